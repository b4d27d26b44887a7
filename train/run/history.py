"""Find out from the records of a run whether it has ever had a complete checkpoint.

A run whose checkpoints are lost must not begin again as if nothing had happened. A run
that was killed before its first save was complete must begin again. These records
decide, each of which may be missing:

1. `results.json` is written after the last save.
2. `starts/<n>.yaml` has the step that the last start restored.
3. `events.jsonl` has a line `saved` for each complete checkpoint, and a line `restore`
   with the step of each start. A start at step 0 makes earlier lines void.
4. If `metrics.jsonl` goes beyond the step of the first save, this save began. It was
   complete, unless its mark is left in `checkpoints/unsealed/`, or a save has failed.
   This decides if the events are lost.
"""

from etils import epath

from train.run.metrics import newest_metrics, read_events
from train.run.starts import newest_start, read_results


def evidence_of_checkpoint(path: epath.Path, save_interval_steps: int) -> str:
    """Return which record shows that a run has had a checkpoint; empty if none does.

    `save_interval_steps` is `checkpoint.save_interval_steps` of the last start.
    """
    if step := read_results(path).get("step"):
        return f"its results.json has the score of step {step}"
    if step := newest_start(path).get("step"):
        return f"its last start began at step {step}"
    saved_step = 0
    has_failed = False
    for event in read_events(path):
        if event["event"] == "restore":
            saved_step = event.get("step") or 0
            has_failed = False
        elif event["event"] == "saved":
            saved_step = event.get("step") or 0
        has_failed |= event["event"] == "save_failed"
    if saved_step:
        return f"its events.jsonl has a checkpoint of step {saved_step}"
    marks = path / "checkpoints" / "unsealed"
    if has_failed or (marks.exists() and any(marks.iterdir())):
        return ""
    newest_step = next((row["step"] for row in newest_metrics(path)), 0)
    if newest_step > save_interval_steps:
        return f"its metrics.jsonl goes to step {newest_step}"
    return ""
