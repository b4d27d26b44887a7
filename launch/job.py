"""The job to run, in a form that every kind of cluster understands.

Nothing reaches a shell unquoted: `shell` and `script_line` quote each word, and words
with characters that cannot be quoted are refused (`control_character_mistakes`).
"""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.storage import is_remote
from launch.config.clusters import Code
from train.cli.quoting import hydra_text
from train.errors import Mistake
from train.masking import holds_secret, is_secret_name

ARCHIVE, UNPACK = "code.tar.gz", "unpack.py"  # in the folder of the submission


@dataclass(frozen=True)
class Job:
    """A command line of training, bound for a cluster.

    name: the job's name: lower-case letters, digits and hyphens, at most 40; the same
        for all submissions of a run.
    run_dir: absolute, or s3:// or gs://.
    folder: the folder of this submission, in the run's directory.
    rendered_to: the folder of the rendered files, if it is another.
    overrides: the overrides of `python -m train`, verbatim.
    root: the folder of this program's packages, here.
    workdir: the folder in which this command was typed.
    staged_bytes: a host's memory while a save copies from it; None: there is no plan.
    held_bytes: a host's memory that the step keeps arrays in.
    """

    name: str
    run_dir: str
    folder: str
    overrides: tuple[str, ...]
    root: str
    workdir: str
    environment: Mapping[str, str] = field(default_factory=dict)
    rendered_to: str | None = None
    staged_bytes: int | None = None
    held_bytes: int = 0

    def command(
        self, python: str, code: Code = Code.shared, prefix: Sequence[str] = ()
    ) -> list[str]:
        """Return the words that train there, started by those of `prefix` if given."""
        # -P leaves the working directory out of the path: `variables` say which code.
        words = [*prefix, python, "-P", "-m", "train", *self.overrides]
        return self._unpacked(words, python, code)

    def status_command(self, python: str, code: Code = Code.shared) -> list[str]:
        """Return the words that print there, as one JSON object, how far the run is."""
        words = [python, "-P", "-m", "train.status", *self.status_arguments]
        return self._unpacked(words, python, code)

    def _unpacked(self, words: list[str], python: str, code: Code) -> list[str]:
        if code is not Code.archive:
            return words
        # An object store holds no program that could be run from there.
        in_store = is_remote(self.folder)
        unpack = ["-m", "launch.unpack"] if in_store else [f"{self.folder}/{UNPACK}"]
        return [python, *unpack, f"{self.folder}/{ARCHIVE}", "--", *words]

    def variables(self, code: Code = Code.shared) -> dict[str, str]:
        """Return the environment that goes with the command."""
        path = {"PYTHONPATH": self.root} if code is Code.shared else {}
        return {**path, **self.environment}

    def cache_variables(self) -> dict[str, str]:
        """Return where XLA keeps compiled programs: in the run, for its next start.

        For accelerators alone: a program for a CPU may hold instructions that another
        node lacks.
        """
        return {"JAX_COMPILATION_CACHE_DIR": f"{self.run_dir}/compilation_cache"}

    @property
    def status_arguments(self) -> tuple[str, ...]:
        """Arguments of `python -m train.status` that print it as one JSON object."""
        return hydra_text("run.dir", self.run_dir), "json=true"


@dataclass(frozen=True)
class Rendered:
    """Files of the submission's folder, the command that submits, and lines before it.

    Only who submits it oneself has to type the lines of shell in `before`.
    """

    files: Mapping[str, str]
    command: Sequence[str]
    before: Sequence[str] = ()


def job_name(run_name: str, run_dir: str) -> str:
    """Return a name that Slurm, Kubernetes and Google Cloud all take."""
    plain = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")[:31].strip("-")
    digits = hashlib.sha256(run_dir.encode()).hexdigest()[:8]
    start = plain if plain[:1].isalpha() else f"run-{plain}"[:31].strip("-")
    return f"{start}-{digits}"


def local_folder(name: str, folder: str) -> Path:
    """Return a submission's folder, or, for a remote one, a local one of its own."""
    if not is_remote(folder):
        return Path(folder)
    return Path.home() / f".local/state/longhaul/{name}/{folder.rpartition('/')[2]}"


def port_of(name: str) -> int:
    """Return a port for process 0, below those that Linux hands out at will."""
    return 20_000 + int(hashlib.sha256(name.encode()).hexdigest(), 16) % 12_000


def shell(words: Sequence[str]) -> str:
    """Return a line of shell that means these words."""
    return shlex.join(words)


def options(values: Mapping[str, Any]) -> list[str]:
    """Return long options: null and false leave one out, true has no value."""
    set_values = {k: v for k, v in values.items() if v is not None and v is not False}
    return [f"--{k}" if v is True else f"--{k}={v}" for k, v in set_values.items()]


def exports(environment: Mapping[str, str]) -> list[str]:
    """Return lines of shell that set these variables."""
    return [f"export {name}={shlex.quote(v)}" for name, v in environment.items()]


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VARIABLE_RULE = "must be a variable's name: letters, digits and underscores"


def environment_mistakes(environment: Mapping[str, str], remedy: str) -> list[Mistake]:
    """List what is no name of a variable, and secrets, with a remedy for these."""
    mistakes = []
    for name, value in environment.items():
        key = f"cluster.environment.{name}"
        if not VARIABLE.fullmatch(name):
            mistakes.append(Mistake(key, value, VARIABLE_RULE))
        elif (is_secret_name(name) and not value.isdecimal()) or holds_secret(value):
            rule = f"looks like a secret, and would be written into files; {remedy}"
            mistakes.append(Mistake(key, "(not shown)", rule))
    return mistakes


def secret_mistakes(overrides: Sequence[str], remedy: str) -> list[Mistake]:
    """List the overrides that hold a secret: they end up in files, word for word."""
    rule = "holds a password or a key, and would be written into files; leave it out "
    rule += f"of the command line, or name a variable as ${{oc.env:NAME}}, and {remedy}"
    keys = [word.partition("=")[0] for word in overrides if holds_secret(word)]
    return [Mistake(key, "(not shown)", rule) for key in keys]


def control_character_mistakes(words: Sequence[str]) -> list[Mistake]:
    """List the words that cannot travel: those with characters that end a line."""
    rule = "must not hold line breaks or control characters, such as no cluster keeps"
    return [
        Mistake("command line", repr(word), rule)
        for word in words
        if any(ord(c) < 32 or ord(c) == 127 for c in word)
    ]
