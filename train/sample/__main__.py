"""`python -m train.sample run.dir=... prompt=...`: generate text from a checkpoint."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Gt, Le
from etils import epath

from data.config import Seed
from data.storage import is_remote
from train.cli.command import run_command
from train.cli.rules import must_name_run
from train.config import Count, NotNegative, RunConfig, RuntimeConfig, Step
from train.errors import ConfigError, Mistake

Continue = Callable[[Sequence[str], int], list[str]]  # prompts, seed
_COMPILING = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


@dataclass(frozen=True)
class SampleConfig:
    """Keys of `python -m train.sample`; the rest is the run's own config.yaml."""

    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    step: Step | None = None  # of the checkpoint, or best; null: the newest
    prompt: str = ""  # text to go on from
    # A file of prompts instead: one a line; of .jsonl the key prompt of each record.
    prompts: str | None = None
    output: str | None = None  # a file for {"prompt": ..., "text": ...} lines
    interactive: bool = False  # go on from what is typed, turn by turn
    num_tokens: Count = 256  # to generate
    stop: list[str] = field(default_factory=list)  # texts before which one ends
    temperature: NotNegative = 0.8  # 0: always the likeliest token
    top_k: Count | None = None  # draw from the k likeliest tokens only; null: from all
    # Draw from the likeliest that make up this part of all chances; null: from all.
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    num_samples: Count = 1  # continuations of each prompt, each drawn anew
    batch_size: Count = 64  # continuations that are generated at once
    seed: Seed = 0  # of the draws

    @property
    def ends(self) -> list[str]:
        r"""Return the texts of `stop`, with the lines and tabs that \n and \t mean.

        A command line has no other way to write them that all shells know.
        """
        tabs = (text.replace(r"\t", "\t") for text in self.stop)
        return [text.replace(r"\n", "\n") for text in tabs]


def validate(config: SampleConfig) -> list[Mistake]:
    """List the mistakes: no run, or two kinds of prompts."""
    mistakes = must_name_run(config)
    if config.prompts and (config.prompt or config.interactive):
        alternative = "interactive=true" if config.interactive else "prompt"
        rule = f"cannot be with {alternative}; leave one of them out"
        mistakes.append(Mistake("prompts", config.prompts, rule))
    for key in ("num_samples", "output"):
        if config.interactive and getattr(config, key) != getattr(SampleConfig(), key):
            rule = "is not for interactive=true; leave one of them out"
            mistakes.append(Mistake(key, getattr(config, key), rule))
    if "" in config.stop:
        rule = "must name texts: each text would end before an empty one"
        mistakes.append(Mistake("stop", config.stop, rule))
    return mistakes


def main(sample_config: SampleConfig) -> int:
    """Print prompt and continuation, samples separated by a line of dashes.

    Raises:
        ConfigError: if the prompts cannot be read, or are too long, or if nothing can
            be written to the output.
    """
    prompts = (
        read_prompts(sample_config.prompts)
        if sample_config.prompts
        else [sample_config.prompt]
    )
    output = output_file(sample_config.output) if sample_config.output else None
    import jax

    from data.encoding import encode
    from train.console import printable
    from train.load_run import load_run
    from train.sample.generate import Sampling
    from train.sample.prompts import continue_prompts

    program, sources, _, params = load_run(
        sample_config.run, sample_config.runtime, sample_config.step
    )
    sampling = Sampling(
        sample_config.temperature, sample_config.top_k, sample_config.top_p
    )

    def go_on(prompts: Sequence[str], seed: int) -> list[str]:
        with jax.set_mesh(program.mesh):
            return continue_prompts(
                program,
                params,
                sources=sources,
                prompts=prompts,
                num_tokens=sample_config.num_tokens,
                sampling=sampling,
                seed=seed,
                stop=sample_config.ends,
            )

    if sample_config.interactive:
        for text in chat(go_on, sample_config.prompt, sample_config.seed):
            print(printable(text), flush=True)
        return 0
    rows = [prompt for prompt in prompts for _ in range(sample_config.num_samples)]
    with _Clock() as clock:
        texts = continue_all(go_on, rows, sample_config.batch_size, sample_config.seed)
    pairs = zip(rows, texts, strict=True)
    if output:
        lines = (json.dumps({"prompt": row, "text": text}) for row, text in pairs)
        output.write_text("".join(f"{line}\n" for line in lines))
    else:
        complete_texts = (printable(row + text) for row, text in pairs)
        print(f"\n{'-' * 72}\n".join(complete_texts))
    count = sum(len(encode(sources.encoding, text.encode())) for text in texts)
    print(f"{count:,} tokens in {clock.speed(count)}", file=sys.stderr)
    return 0


def continue_all(
    go_on: Continue, rows: Sequence[str], batch_size: int, seed: int
) -> list[str]:
    """Continue any number of prompts, in batches of one size."""
    texts = dict[int, str]()
    # Prompts of similar length are batched together, which avoids padding.
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i].encode()))
    for first in range(0, len(rows), batch_size):
        numbers = by_length[first : first + batch_size]
        batch = [rows[i] for i in numbers]
        if first:  # another number of rows would be another program
            batch += batch[-1:] * (batch_size - len(batch))
        texts |= zip(numbers, go_on(batch, seed + first), strict=False)
    return [texts[i] for i in range(len(rows))]


class _Clock:
    """Measures a block, and how long of it XLA compiled."""

    def __enter__(self) -> "_Clock":
        """Begin."""
        from jax import monitoring

        self._began, self._compiled_s = time.monotonic(), 0.0
        monitoring.register_event_duration_secs_listener(self._note)
        return self

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event in _COMPILING:
            self._compiled_s += duration_secs

    def __exit__(self, *_: object) -> None:
        """End."""
        self._seconds = time.monotonic() - self._began

    def speed(self, count: int) -> str:
        """Return the time, and the number of tokens a second."""
        rate = count / (self._seconds - self._compiled_s)
        of_it = f", {self._compiled_s:.1f} of it compiling"
        return f"{self._seconds:.1f} s{of_it}: {rate:,.0f} tokens/s"


def output_file(path: str) -> epath.Path:
    """Return a file, once it can be written: before there is anything to lose.

    Raises:
        ConfigError: if it cannot be.
    """
    from train.run.folder import run_folder

    file = run_folder(path, "output")
    try:
        if not is_remote(file):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).open("a").close()
        elif not file.exists():
            file.write_bytes(b"")
    except Exception as error:  # each store has errors of its own
        rule = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise ConfigError([Mistake("output", path, rule)]) from None
    return file


def read_prompts(path: str) -> list[str]:
    """Read a file of prompts, empty lines left out.

    Raises:
        ConfigError: if there is no such file, or no prompt in it.
    """
    try:
        file = Path(path).expanduser()
        lines = [line for line in file.read_text().splitlines() if line.strip()]
        if file.suffix == ".jsonl":
            lines = [str(json.loads(line)["prompt"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"cannot be read: {type(error).__name__}: {error}"
        raise ConfigError([Mistake("prompts", path, rule)]) from None
    if not lines:
        raise ConfigError([Mistake("prompts", path, "holds no prompt")])
    return lines


def chat(go_on: Continue, text: str, seed: int) -> Iterator[str]:
    """Yield what the model adds to each line that is typed, until the input ends.

    All that was said so far is the prompt; an empty line lets the model go on.
    """
    turn = 0
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        text += f"{line}\n" if line else ""
        (added,) = go_on([text], seed + turn)
        text, turn = text + added, turn + 1
        yield added


if __name__ == "__main__":
    run_command(main, "sample", SampleConfig, validate)
