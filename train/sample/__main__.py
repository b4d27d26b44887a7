"""`python -m train.sample run.dir=... prompt=...`: generate text from a checkpoint."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Gt, Le
from etils import epath
from typing_extensions import Doc

from data.config import Seed
from data.errors import Mistake
from data.storage import check_regular, is_remote
from train.cli.command import Command, run_command
from train.cli.rules import must_name_run
from train.config import Config, Count, NotNegative, RunConfig, RuntimeConfig, Step
from train.errors import ConfigError, writing

log = logging.getLogger(__name__)

Continue = Callable[[Sequence[str], int], list[str]]  # (prompts, seed) -> texts
_COMPILE_EVENTS = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


@dataclass(frozen=True)
class SampleConfig:
    """Keys of `python -m train.sample`. The run's config.yaml gives all others."""

    run_schema = Config  # A catalog replaces it by a dataclass with added parts.

    run: RunConfig = field(default_factory=RunConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    step: Annotated[
        Step | None, Doc("The step of the checkpoint, or best. null: the newest.")
    ] = None
    prompt: Annotated[str, Doc("The text to continue.")] = ""
    prompts: Annotated[
        str | None,
        Doc(
            "A file with a prompt on each line, or .jsonl records with the key prompt."
        ),
    ] = None
    output: Annotated[
        str | None,
        Doc('A file for lines of {"prompt": ..., "text": ...}. null prints the texts.'),
    ] = None
    interactive: Annotated[bool, Doc("Continue what is typed, turn by turn.")] = False
    num_tokens: Annotated[Count, Doc("The number of tokens to generate.")] = 256
    stop: Annotated[list[str], Doc("A text ends before the first of these.")] = field(
        default_factory=list
    )
    temperature: Annotated[
        NotNegative, Doc("0 always takes the most likely token.")
    ] = 0.8
    top_k: Annotated[
        Count | None,
        Doc("Draw from the k most likely tokens only. null draws from all."),
    ] = None
    top_p: Annotated[
        Annotated[float, Gt(0), Le(1)] | None,
        Doc(
            "Draw from the most likely tokens with this total probability. null draws "
            "from all."
        ),
    ] = None
    num_samples: Annotated[
        Count, Doc("The number of continuations of each prompt, each with new draws.")
    ] = 1
    batch_size: Annotated[
        Count, Doc("The number of continuations that are generated at once.")
    ] = 64
    seed: Annotated[Seed, Doc("The seed of the draws.")] = 0

    @property
    def stop_texts(self) -> list[str]:
        r"""Return the texts of `stop`, with \n and \t as line feeds and tabs.

        No other notation for line feeds and tabs works in all shells.
        """
        tabs = (text.replace(r"\t", "\t") for text in self.stop)
        return [text.replace(r"\n", "\n") for text in tabs]


def sample_mistakes(config: SampleConfig) -> list[Mistake]:
    """List mistakes: a missing run, an empty stop, or keys that cannot be combined."""
    mistakes = must_name_run(config)
    if config.prompts and (config.prompt or config.interactive):
        alternative = "interactive=true" if config.interactive else "prompt"
        rule = f"cannot be combined with {alternative}; leave one of them out"
        mistakes.append(Mistake("prompts", config.prompts, rule))
    for key in ("num_samples", "output"):
        if config.interactive and getattr(config, key) != getattr(SampleConfig(), key):
            rule = "has no effect with interactive=true; leave one of them out"
            mistakes.append(Mistake(key, getattr(config, key), rule))
    if "" in config.stop:
        rule = "must not hold an empty text, which would end every text at once"
        mistakes.append(Mistake("stop", config.stop, rule))
    return mistakes


def main(config: SampleConfig) -> int:
    """Continue prompts, and print the texts or write them to a file.

    Raises:
        ConfigError: if the prompts cannot be read or are too long, or if the output
            cannot be written.
    """
    prompts = read_prompts(config.prompts) if config.prompts else [config.prompt]
    output = output_file(config.output) if config.output else None
    from jax import monitoring

    from data.beginning import beginning_of
    from data.encoding import encode
    from train.console import printable
    from train.load_run import load_run
    from train.sample.generate import Sampling
    from train.sample.prompts import continue_rows, prompt_rows

    program, sources, _, params = load_run(
        config.run, config.runtime, config.step, schema=config.run_schema
    )
    encoding = sources.encoding
    beginning = beginning_of(program.config.data, encoding)
    if "" in prompts and not sources.has_many_documents:
        log.warning(
            "the model was trained on a single document, so it has hardly seen how a "
            "text begins: give it a prompt"
        )

    def continue_prompts(prompts: Sequence[str], seed: int) -> list[str]:
        return continue_rows(
            program,
            params,
            encoding,
            rows=prompt_rows(encoding, prompts, beginning),
            num_tokens=config.num_tokens,
            sampling=Sampling(config.temperature, config.top_k, config.top_p),
            seed=seed,
            stop=config.stop_texts,
        )

    if config.interactive:
        for text in chat(continue_prompts, config.prompt, config.seed):
            print(printable(text), flush=True)
        return 0
    prompts = [prompt for prompt in prompts for _ in range(config.num_samples)]
    compile_times_s = [0.0]

    def add_duration(event: str, duration_secs: float, **kwargs: str | int) -> None:
        compile_times_s.append(duration_secs * (event in _COMPILE_EVENTS))

    monitoring.register_event_duration_secs_listener(add_duration)
    start = time.monotonic()
    texts = continue_all(continue_prompts, prompts, config.batch_size, config.seed)
    seconds = time.monotonic() - start
    compiling_s = sum(compile_times_s)
    pairs = zip(prompts, texts, strict=True)
    if output:
        lines = (json.dumps({"prompt": p, "text": text}) for p, text in pairs)
        with writing("output", output):
            output.write_text("".join(f"{line}\n" for line in lines))
    else:
        print(f"\n{'-' * 72}\n".join(printable(p + text) for p, text in pairs))
    num_tokens = sum(len(encode(encoding, text.encode())) for text in texts)
    speed = f"{num_tokens / (seconds - compiling_s):,.0f} tokens/s"
    duration = f"{seconds:.1f} s, {compiling_s:.1f} s of it compiling"
    print(f"{num_tokens:,} tokens in {duration}: {speed}", file=sys.stderr)
    return 0


def continue_all(
    continue_prompts: Continue, prompts: Sequence[str], batch_size: int, seed: int
) -> list[str]:
    """Return the continuations of any number of prompts, in batches of one size."""
    texts = dict[int, str]()
    # Prompts of similar length are batched together, which avoids padding.
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].encode()))
    for start in range(0, len(prompts), batch_size):
        indices = by_length[start : start + batch_size]
        batch = [prompts[i] for i in indices]
        if start:  # Another batch size would compile another program.
            batch += batch[-1:] * (batch_size - len(batch))
        texts |= zip(indices, continue_prompts(batch, seed + start), strict=False)
    return [texts[i] for i in range(len(prompts))]


def output_file(path: str) -> epath.Path:
    """Return the output file after a check that it can be written.

    Raises:
        ConfigError: if the file cannot be written.
    """
    from train.run.folder import run_folder

    file = run_folder(path, "output")
    try:
        if not is_remote(file):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            if file.exists():  # Opening a pipe would wait for its reader.
                check_regular(file)
            Path(file).open("a").close()
        elif not file.exists():
            file.write_bytes(b"")
    except Exception as error:  # Each store raises different errors.
        rule = f"cannot be written: {getattr(error, 'strerror', None) or error}. "
        rule += "Name a file where you may write"
        raise ConfigError([Mistake("output", path, rule)]) from None
    return file


def read_prompts(path: str) -> list[str]:
    """Read a file of prompts without its empty lines.

    Raises:
        ConfigError: if the file cannot be read or holds no prompt.
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


def chat(continue_prompts: Continue, text: str, seed: int) -> Iterator[str]:
    """Yield the model's continuation after each typed line, until the input ends.

    The prompt is the whole conversation. An empty line adds nothing to it.
    """
    turn = 0
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        text += f"{line}\n" if line else ""
        (continuation,) = continue_prompts([text], seed + turn)
        text = text + continuation
        turn = turn + 1
        yield continuation


COMMAND = Command(main, "sample", SampleConfig, sample_mistakes)

if __name__ == "__main__":
    run_command(COMMAND)
