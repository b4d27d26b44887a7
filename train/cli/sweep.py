"""Run each job of `--multirun` in a separate process, and print a table of results."""

import logging
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from train.cli.compose import check_command_line
from train.cli.flags import flags_first
from train.cli.presets import CONFIG_DIR, VERSION_BASE, register
from train.console import print_table
from train.errors import WRONG_DATA

log = logging.getLogger(__name__)


def run_sweep(
    arguments: Sequence[str],
    flags: Namespace,
    config_name: str,
    schema: type,
    outcome: Callable[[Any], tuple[str, float | None]] | None,
) -> int:
    """Run the jobs of a checked command line one after the other, and print a table.

    A job that fails does not end the sweep, but a signal to stop does.

    Returns:
        The exit code of the first job that failed, or 0.
    """
    jobs: list[tuple[list[str], int]] = []

    def job(cfg: DictConfig) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        jobs.append((overrides, _run(flags, overrides)))

    register(schema)
    with tempfile.TemporaryDirectory() as folder:
        # The sweeper always writes a multirun.yaml; it goes into this folder.
        sys.argv[1:] = [*flags_first(arguments), f'hydra.sweep.dir="{folder}"']
        hydra.main(str(CONFIG_DIR), config_name, VERSION_BASE)(job)()
    shared = set.intersection(*(set(overrides) for overrides, _ in jobs))
    rows = []
    for number, (overrides, code) in enumerate(jobs):
        differing = " ".join(t.lstrip("+") for t in overrides if t not in shared)
        directory, loss = "-", None
        if outcome and code != WRONG_DATA:
            words = [*_presets(flags), *overrides]
            directory, loss = outcome(check_command_line(words, config_name, schema))
        # A refused job has the directory and the loss of another run.
        shown = "-" if code or loss is None else f"{loss:.4f}"
        rows.append([str(number), differing, str(code), shown, directory])
    headers = ["job", "overrides", "exit code", "eval loss", "run.dir"]
    print_table(rows, headers, "sweep")
    return next((code for _, code in jobs if code), 0)


def _presets(flags: Namespace) -> list[str]:
    """Return the flags with which a job finds its presets."""
    given = {"--config-name": flags.config_name, "--config-dir": flags.config_dir}
    return [word for name, value in given.items() if value for word in (name, value)]


def _run(flags: Namespace, overrides: list[str]) -> int:
    """Run one job; a signal to stop is passed to the job, and then ends the sweep."""
    spec = sys.modules["__main__"].__spec__
    command = ["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]]
    log.info("sweep: %s", " ".join(overrides) or "(no overrides)")
    process = subprocess.Popen([sys.executable, *command, *_presets(flags), *overrides])
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        if number == signal.SIGTERM:  # the terminal sends Ctrl-C to the job itself
            process.send_signal(number)

    handlers = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    code = process.wait()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    code = 128 - code if code < 0 else code  # like a shell: an abort is 134
    if stopped:
        sys.exit(code or 128 + stopped[0])
    if code:
        log.warning("sweep: exit code %d of %s", code, " ".join(overrides))
    return code
