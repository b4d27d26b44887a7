"""The results of a finished run: scores, compression for comparison, and a sample."""

import gzip
import lzma
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from data.beginning import beginning_of
from data.encoding import decode
from data.errors import DataError
from data.sources import Sources
from model.choices import Position
from train.config import RunConfig, ScheduleConfig
from train.console import printable
from train.evaluate.validation import Score, as_metrics
from train.resolve.program import ConfiguredProgram
from train.run.evaluations import format_scores
from train.run.goodput import goodput_of
from train.run.metrics import read_events
from train.run.validations import PART, TITLES, WHOLE, read_validations
from train.sample.generate import Sampling
from train.sample.prompts import continue_rows
from train.units import format_bytes

_COMPRESSED_BYTES = 2**24  # The maximum to compress: xz would take hours for more.
_PRINTED_KEYS = (
    *("step", "eval/loss", "scored_tokens", "validation_tokens", "validation_bytes"),
    *("compressed_bytes", "compressed", "sample", "sample_prompt"),
)
_SAMPLE_TOKENS = 400
_PROMPT_TOKENS = 32  # of a sample that begins with the validation text


def compute_results(
    program: ConfiguredProgram,
    params: Any,
    sources: Sources,
    step: int,
    evaluations: Mapping[str, Mapping[str, Score]],
) -> dict[str, Any]:
    """Return the results of a run as JSON values, with scores as in metrics.jsonl.

    `evaluations` holds scores by their prefix, the most telling ones last; the counts
    are those of the last. `validation_bytes` is the size of the scored text.
    `compressed_bytes` is the size, before compression, of the text from the beginning
    of the split that is compressed for comparison.

    `sample` begins as documents do. If the model was trained on a single document, it
    begins with the first tokens of the validation text, which are `sample_prompt`.
    """
    model = program.config.model
    encoding = sources.encoding
    *_, scores = evaluations.values()
    score = scores[""]
    max_positions = _SAMPLE_TOKENS + 1
    if model.position is Position.learned:
        max_positions = model.max_sequence_length or 0
    num_tokens = sources.num_tokens("validation")
    scored_bytes = num_bytes = sources.num_bytes("validation")
    if not score.whole:
        share = min(1.0, (score.num_targets + 1) / num_tokens)
        scored_bytes = max(1, round(share * num_bytes))
    text = sources.text("validation", min(scored_bytes, _COMPRESSED_BYTES))
    row = [beginning_of(program.config.data, encoding).token]
    prompt = ""
    if not sources.has_many_documents:
        # The model has hardly seen how a text begins.
        row = _first_tokens(sources, max_positions // 2)
        prompt = decode(encoding, row)
    (continuation,) = continue_rows(
        program,
        params,
        encoding,
        rows=[row],
        num_tokens=min(_SAMPLE_TOKENS, max_positions - len(row)),
        sampling=Sampling(),
    )
    return {
        "step": step,
        **{k: v for p, s in evaluations.items() for k, v in as_metrics(s, p).items()},
        "scored_tokens": score.num_targets,
        "validation_tokens": num_tokens,
        "validation_bytes": scored_bytes,
        "compressed_bytes": len(text),
        "compressed": compression_bits_per_byte(text),  # bits per byte
        "sample": prompt + continuation,
        "sample_prompt": prompt,  # the beginning of the sample, which was given
    }


def _first_tokens(sources: Sources, limit: int) -> list[int]:
    """Return the first tokens of the validation text, which end with a character."""
    (store,) = sources.stores.values()
    tokens = store.split(sources.held_out)
    count = min(_PROMPT_TOKENS, limit, len(tokens))
    ids = tokens.read(0, count).tolist()
    while len(ids) > 1 and decode(store.encoding, ids).endswith("\ufffd"):
        ids.pop()
    return ids


def print_results(
    values: dict[str, Any],
    command: str,
    run_dir: epath.Path,
    schedule: ScheduleConfig,
    run: RunConfig,
) -> None:
    """Print results, goodput, and a command that continues training.

    Raises:
        DataError: if the results lack a value to print.
    """
    if missing := [key for key in _PRINTED_KEYS if key not in values]:
        raise DataError(
            f"{run_dir}/results.json: does not hold {', '.join(missing)}. Delete it, "
            f"and the next start of the run scores its last checkpoint again"
        )
    step = values["step"]
    overrides = [f"train.num_steps={2 * step}"]
    # The learning rate of further steps must not be 0.
    if schedule.ends_at_zero:
        key = "schedule.final_fraction"
        # The override changes the default run name, so the command must name the run.
        name = run.name or run.dir
        overrides += [f"{key}=0.1", f"run.allow_change=[{key}]"]
        overrides += [] if name else [f"run.name={run_dir.name}"]
    print(f"\nfinished    {step:,} steps")
    validation, *sets = score_lines(values)
    print("\n".join([validation, f"            {_compressor_line(values)}", *sets]))
    best = read_validations(run_dir).best
    if best and best.step != step:
        print(f"best        {best} at step {best.step:,}, while training")
    task_scores = {key: v for key, v in values.items() if key.startswith("tasks/")}
    for task, metric, value, *_ in format_scores(task_scores):
        print(f"task        {task} {metric} {value}")
    goodput = str(goodput_of(read_events(run_dir))).replace("\n", "\n            ")
    print(f"goodput     {goodput}")
    if prompt := values["sample_prompt"]:
        source = "the first tokens of the validation text"
        print(f"sample      begins with {source}, {prompt!a}")
    else:
        print("sample")
    print("\n".join(f"  | {line}" for line in printable(values["sample"]).split("\n")))
    # The overrides replace earlier values in the command.
    keys = {override.partition("=")[0] for override in overrides}
    words = [w for w in shlex.split(command) if w.partition("=")[0] not in keys]
    print(f"to go on    {shlex.join([*words, *overrides])}", flush=True)


def score_lines(metrics: Mapping[str, Any]) -> list[str]:
    """Return lines with the losses of the validation split and of each set.

    Scores of the whole set come before those of the rows that all steps score, which
    are left out if these are the whole set.
    """
    prefixes = [*TITLES]
    targets = metrics.get(f"{WHOLE}/targets")
    if targets is not None and targets == metrics.get(f"{PART}/targets"):
        prefixes.remove(PART)
    return [
        line for prefix in prefixes for line in _lines_of_prefix(metrics, f"{prefix}/")
    ]


def _lines_of_prefix(metrics: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, loss in metrics.items():
        if key.startswith(prefix) and key.endswith("/loss"):
            name = key.removeprefix(prefix).removesuffix("loss").rstrip("/")
            title = f"  {name}" if name else TITLES[prefix.rstrip("/")]
            line = f"{title:<12}"
            line += "not finite" if loss is None else f"{loss:.4f} nats a token"
            bits = metrics.get(f"{key.removesuffix('loss')}bits_per_byte")
            yield line if bits is None else f"{line}, {bits:.3f} bits per byte"


def _compressor_line(values: dict[str, Any]) -> str:
    """Return a line with compressors' bits per byte on the scored text or its start."""
    compressors = ", ".join(f"{k} -9 {v:.3f}" for k, v in values["compressed"].items())
    scored = values["scored_tokens"]
    total = values["validation_tokens"]
    size = values["validation_bytes"]
    compressed_size = values["compressed_bytes"]
    text = f"the same {format_bytes(size)}"
    if scored < 0.99 * total:
        text = f"of {scored:,} of {total:,} tokens, evenly spread; the first "
        text += format_bytes(size)
    if compressed_size < size:
        text = f"the first {format_bytes(compressed_size)} of it"
    return f"{text} in bits per byte: {compressors}"


def compression_bits_per_byte(text: bytes) -> dict[str, float]:
    """Return the bits per byte of gzip -9 and xz -9, which a model should beat."""
    sizes = {
        "gzip": len(gzip.compress(text, 9, mtime=0)),
        "xz": len(lzma.compress(text, preset=9)),
    }
    return {name: 8 * size / len(text) for name, size in sizes.items()}
