"""Describe a training job independently of the kind of cluster.

`shell` quotes each word of a command. `control_character_mistakes` refuses words with
line breaks or control characters, which no cluster passes on intact.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import Mistake
from data.program import command_words, installed_words
from data.storage import is_remote
from launch.config.clusters import Code
from train.cli.quoting import hydra_text
from train.masking import holds_secret, is_secret_name

# The files in a submission's folder.
ARCHIVE = "code.tar.gz"
UNPACK = "unpack.py"


@dataclass(frozen=True)
class Job:
    """A training run to start on a cluster.

    name: at most 40 lower-case letters, digits and hyphens. All submissions of a run
        have the same name.
    run_dir: an absolute path, or an s3:// or gs:// URL.
    folder: the folder of this submission, inside the run's directory.
    rendered_to: the folder to which action=render writes the files; None for `folder`.
    overrides: the overrides of `python -m train`, verbatim.
    root: the folder of this program's packages on this machine.
    workdir: the folder in which this command was typed.
    staged_bytes: the most bytes that an asynchronous save copies to one host's memory;
        None without a plan.
    held_bytes: the bytes of offloaded arrays that a step keeps in one host's memory.
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
        """Return the training command, with `prefix` before `python -m train`."""
        words = [*prefix, *start_words("train", python, code), *self.overrides]
        return self._with_unpacking(words, python, code)

    def status_command(self, python: str, code: Code = Code.shared) -> list[str]:
        """Return the command that prints the run's status as one JSON object."""
        words = [*start_words("train.status", python, code), *self.status_arguments]
        return self._with_unpacking(words, python, code)

    def _with_unpacking(self, words: list[str], python: str, code: Code) -> list[str]:
        if code is not Code.archive:
            return words
        # Python cannot run a file in an object store, so the machine needs an installed
        # launch.unpack, for example in its image.
        in_store = is_remote(self.folder)
        unpack = [python, f"{self.folder}/{UNPACK}"]
        if in_store:
            unpack = installed_words("launch.unpack", python)
        return [*unpack, f"{self.folder}/{ARCHIVE}", "--", *words]

    def variables(self, code: Code = Code.shared) -> dict[str, str]:
        """Return the environment variables that the command needs."""
        python_path = {"PYTHONPATH": self.root} if code is Code.shared else {}
        return {**python_path, **self.environment}

    def cache_variables(self) -> dict[str, str]:
        """Return the variable that makes JAX cache programs in the run's directory.

        Use it for accelerators only: a program compiled for the CPU of one node may
        contain instructions that the CPU of another node lacks.
        """
        return {"JAX_COMPILATION_CACHE_DIR": f"{self.run_dir}/compilation_cache"}

    @property
    def status_arguments(self) -> tuple[str, ...]:
        """The arguments of `python -m train.status` that print one JSON object."""
        return hydra_text("run.dir", self.run_dir), "json=true"


def start_words(module: str, python: str, code: Code) -> list[str]:
    """Return the words that start a module; `Job.variables` sets PYTHONPATH."""
    if code is Code.image:
        return installed_words(module, python)
    return command_words(module, python, unpacked=code is Code.archive)


@dataclass(frozen=True)
class Rendered:
    """The files of a submission by name, and the command that submits them.

    preparation: lines of shell that a user must run before typing the command.
    """

    files: Mapping[str, str]
    command: Sequence[str]
    preparation: Sequence[str] = ()


def job_name(run_name: str, run_dir: str) -> str:
    """Return a name that Slurm, Kubernetes and Google Cloud all accept."""
    slug = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")[:31].strip("-")
    digest = hashlib.sha256(run_dir.encode()).hexdigest()[:8]
    prefix = slug if slug[:1].isalpha() else f"run-{slug}"[:31].strip("-")
    return f"{prefix}-{digest}"


def local_folder(name: str, folder: str) -> Path:
    """Return `folder`, or a folder under the user's home if `folder` is remote."""
    if not is_remote(folder):
        return Path(folder)
    return Path.home() / f".local/state/longhaul/{name}/{folder.rpartition('/')[2]}"


def port_of(name: str) -> int:
    """Return the port of process 0, derived from the job's name.

    It is below 32,768, where the ports begin that Linux assigns to any program.
    """
    return 20_000 + int(hashlib.sha256(name.encode()).hexdigest(), 16) % 12_000


def shell(words: Sequence[str]) -> str:
    """Quote words and join them into a line of shell."""
    return shlex.join(words)


def long_options(values: Mapping[str, Any]) -> list[str]:
    """Return options as `--key=value`; omit None and False, write True as `--key`."""
    set_values = {k: v for k, v in values.items() if v is not None and v is not False}
    return [f"--{k}" if v is True else f"--{k}={v}" for k, v in set_values.items()]


def export_lines(environment: Mapping[str, str]) -> list[str]:
    """Return lines of shell that export these variables."""
    return [f"export {name}={shlex.quote(v)}" for name, v in environment.items()]


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
VARIABLE_RULE = "must be a variable's name: letters, digits and underscores"


def environment_mistakes(environment: Mapping[str, str], remedy: str) -> list[Mistake]:
    """List variables that have an invalid name or look like a secret."""
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
    """List the overrides that contain a secret, because overrides are recorded."""
    rule = "holds a password or a key, and would be written into files; leave it out "
    rule += f"of the command line, or name a variable as ${{oc.env:NAME}}, and {remedy}"
    keys = [word.partition("=")[0] for word in overrides if holds_secret(word)]
    return [Mistake(key, "(not shown)", rule) for key in keys]


def control_character_mistakes(words: Sequence[str]) -> list[Mistake]:
    """List the words with control characters, which no cluster passes on intact."""
    rule = "must not hold line breaks or control characters: no cluster passes them on"
    return [
        Mistake("command line", repr(word), rule)
        for word in words
        if any(ord(c) < 32 or ord(c) == 127 for c in word)
    ]
