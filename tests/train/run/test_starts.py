"""Each start of a run records its changes, and only some new starts may continue."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from etils import epath

from data.config import DataConfig, MixtureSource, Source, WeightChange
from data.program import PREFIX
from train.cli.schema import config_yaml
from train.config import Config, Schedule, ScheduleConfig
from train.errors import ConfigError, exit_code
from train.run.continuation import compare_with_run
from train.run.starts import document_start_of, read_run
from train.run.this_start import ThisStart

WSD, COSINE, CONSTANT = map(
    ScheduleConfig, (Schedule.wsd, Schedule.cosine, Schedule.constant)
)


def write_run(folder: Path, config: Config, *starts: tuple[int, dict]) -> None:
    (folder / "starts").mkdir()
    (folder / "config.yaml").write_text(config_yaml(config))
    events = []
    for number, (step, changes) in enumerate(starts, 1):
        text = yaml.safe_dump({"changes": changes, "data_fingerprints": {}})
        (folder / "starts" / f"{number}.yaml").write_text(text)
        events.append({"start": number, "event": "restore", "step": step})
        events.append({"start": number, "event": "idle"})
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(lines)


def test_the_config_of_a_step_is_that_of_the_start_that_took_it(tmp_path):
    sources = {name: MixtureSource(name, 1.0) for name in ("web", "code")}
    config = Config(data=DataConfig(source=Source.mixture, sources=sources))
    change = [{"step": 12, "weights": {"web": 1.0}}]
    keys = ("path", "weight", "epochs", "format")
    source_changes = {f"data.sources.code.{key}": None for key in keys}
    source_changes |= {"data.sources.new.path": "new"}
    write_run(
        tmp_path,
        config,
        (0, {}),
        (10, {"data.weight_changes": change}),
        (20, {"train.num_steps": 50, **source_changes}),
    )
    run = replace(config.run, dir=str(tmp_path))
    for step in (0, 9):
        assert read_run(str(tmp_path), step) == replace(config, run=run)
    for step in (10, 19):
        data_config = read_run(str(tmp_path), step).data
        assert data_config.weight_changes == [WeightChange(12, {"web": 1.0})]
        assert data_config.sources == sources
    last_config = read_run(str(tmp_path))
    assert last_config == read_run(str(tmp_path), 20)
    assert last_config.train.num_steps == 50
    assert last_config.data.sources == {
        "web": sources["web"],
        "new": MixtureSource("new", 1.0),
    }


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError) as error:
        read_run(str(tmp_path))
    (mistake,) = error.value.mistakes
    assert (mistake.key, mistake.value) == ("run.dir", str(tmp_path))
    remedy = "must name the directory of a run"
    reason = "there is no"
    assert mistake.rule == f"{remedy}; {reason} {tmp_path}/config.yaml"
    assert exit_code(error.value) == 78


def start_with(
    folder: Path,
    steps: int,
    newest: int,
    results: int | None = None,
    schedule: ScheduleConfig = COSINE,
    recorded: int | None = None,
    **run,
):
    """Compare a start of `steps` steps with a run of 1,600 that has reached `newest`.

    `recorded` is the schedule length of the last start of the run, if it is known.
    """
    folder = epath.Path(folder)
    first = Config(schedule=schedule)
    write_run(Path(folder), first, (0, {}))
    if recorded:
        text = yaml.safe_dump({"schedule_steps": recorded, "data_fingerprints": {}})
        (folder / "starts" / "2.yaml").write_text(text)
    (folder / "checkpoints" / str(newest)).mkdir(parents=True)
    (folder / "checkpoints" / "quarantine").mkdir()
    if results:
        (folder / "results.json").write_text(json.dumps({"step": results}))
    sources: Any = SimpleNamespace(fingerprints={})
    train = replace(first.train, num_steps=steps)
    run = replace(first.run, **run)
    config = replace(first, train=train, run=run)
    return compare_with_run(ThisStart(folder, config, sources))


def test_an_end_that_the_run_has_passed_is_refused_and_changes_nothing(tmp_path):
    rule = r"train.num_steps = 60\n *is below step 445, .* on its way to 1600"
    with pytest.raises(ConfigError, match=rule):
        start_with(tmp_path, 60, newest=445)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"config.yaml", "1.yaml", "events.jsonl"}


@pytest.mark.parametrize(
    ("steps", "newest", "results", "rewind_to", "finished"),
    [
        (445, 445, None, None, False),  # only its results are missing
        (60, 445, None, 50, False),  # the rewind is to before that end
        (60, 445, 445, None, True),  # the run has ended, whatever is requested
        (2000, 1600, 1600, None, False),
    ],
)
def test_an_end_that_the_run_can_reach_or_has_reached_is_accepted(
    tmp_path, steps, newest, results, rewind_to, finished
):
    start = start_with(tmp_path, steps, newest, results, rewind_to=rewind_to)
    assert (start.finished, start.rewind_to) == (finished, rewind_to)


@pytest.mark.parametrize(
    ("schedule", "steps", "newest", "rewind_to", "length", "said"),
    [
        (WSD, 1600, 1500, None, 1600, ""),
        (WSD, 800, 560, None, 800, "was 1600 steps, and is 800 now"),
        (WSD, 2400, 1120, None, 2400, "was 1600 steps, and is 2400 now"),
        (
            WSD,
            800,
            562,
            None,
            1600,
            "100% of the peak rate; add run.rewind_to=560",
        ),
        (WSD, 800, 562, 560, 800, "is 800 now"),
        (WSD, 2400, 1122, None, 1600, "stays at its last value"),
        (WSD, 1360, 1200, None, 1600, "ends at 55% of the peak rate"),
        (COSINE, 850, 400, None, 1600, "ends at 55% of the peak rate; a schedule"),
        (COSINE, 2400, 400, None, 1600, "stays at its last value"),
        (CONSTANT, 800, 400, None, 1600, ""),
    ],
)
def test_only_wsd_takes_another_length_and_only_before_its_decay(
    tmp_path, caplog, schedule, steps, newest, rewind_to, length, said
):
    """The rate is at its peak up to step 1,120 of 1,600 or 560 of 800, then falls."""
    caplog.set_level("INFO", f"{PREFIX}train")
    start = start_with(tmp_path, steps, newest, schedule=schedule, rewind_to=rewind_to)
    assert start.schedule_steps == length
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


@pytest.mark.parametrize(
    ("steps", "newest", "length"),
    [(800, 700, 800), (1600, 700, 800), (1600, 300, 1600)],
)
def test_a_later_start_continues_with_the_recorded_schedule_length(
    tmp_path, steps, newest, length
):
    start = start_with(tmp_path, steps, newest, schedule=WSD, recorded=800)
    assert start.schedule_steps == length


def test_the_changes_of_a_start_are_read_back(tmp_path):
    first = Config()
    sources: Any = SimpleNamespace(fingerprints={})
    remat: Any = ("mlp_up", "attention_output")
    later = replace(first, train=replace(first.train, remat=remat))
    for number, config in enumerate((first, later), 1):
        ThisStart(epath.Path(tmp_path), config, sources).record(number, 1600)
    assert read_run(str(tmp_path)).train.remat == remat


@pytest.mark.parametrize(("now", "refused"), [("abc", None), ("xyz", "data.path")])
def test_data_may_move_but_not_change(tmp_path, now, refused):
    first = Config(data=DataConfig(source=Source.tokens, path="here"))
    recorded_sources: Any = SimpleNamespace(fingerprints={"train": "abc"})
    path = epath.Path(tmp_path)
    ThisStart(path, first, recorded_sources).record(1, 1600)
    moved_config = replace(first, data=replace(first.data, path="there"))
    sources: Any = SimpleNamespace(fingerprints={"train": now}, path="there")
    start = ThisStart(path, moved_config, sources)
    if refused is None:
        assert not compare_with_run(start).finished
        return
    with pytest.raises(ConfigError, match=refused):
        compare_with_run(start)


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("recorded", ["config lost", True, False, None])
def test_documents_begin_as_they_did_when_the_run_began(
    tmp_path, given, mask, recorded
):
    original = recorded if recorded in (True, None) else False
    first = Config(data=DataConfig(document_mask=mask, document_start=original))
    folder = epath.Path(tmp_path)
    text = config_yaml(first)
    if recorded == "config lost":  # the checkpoint has the key
        file = folder / "checkpoints/5/_CHECKPOINT_METADATA"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"custom_metadata": {"config": text, "step": 5}}))
    else:
        write_run(tmp_path, first, (0, {}))
    if recorded != "config lost":
        assert read_run(str(tmp_path)).data == first.data
    config = replace(first, data=replace(first.data, document_start=given))
    value = document_start_of(folder, config.data)
    assert value == (original if given is None else given)
    config = replace(first, data=replace(first.data, document_start=value))
    sources: Any = SimpleNamespace(fingerprints={})
    is_same = not mask or given is None or given == (original is not False)
    if is_same:
        compare_with_run(ThisStart(folder, config, sources))
    else:
        with pytest.raises(ConfigError, match=r"data\.document_start = ") as error:
            compare_with_run(ThisStart(folder, config, sources))
        assert len(error.value.mistakes) == 1


@pytest.mark.parametrize("mask", [True, False])
def test_documents_of_a_new_run_begin_with_the_token(tmp_path, mask):
    config = Config(data=DataConfig(document_mask=mask))
    assert document_start_of(epath.Path(tmp_path), config.data) is (
        True if mask else None
    )


def test_a_start_that_was_allowed_another_document_start_is_followed(tmp_path):
    write_run(tmp_path, Config(), (0, {}), (5, {"data.document_start": False}))
    assert document_start_of(epath.Path(tmp_path), DataConfig()) is False
    assert read_run(str(tmp_path), 3).data.has_beginning_tokens
    assert not read_run(str(tmp_path), 7).data.has_beginning_tokens
