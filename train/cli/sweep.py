"""`--multirun`: each job in a process of its own, and a table of what came of them."""

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
    """Run every job of a checked command line, one after the other; print a table.

    A job that fails does not end the sweep; a signal to stop does.

    Returns:
        The exit code of the first job that failed, else 0.
    """
    jobs: list[tuple[list[str], int]] = []

    def job(cfg: DictConfig) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        jobs.append((overrides, _run(flags, overrides)))

    register(schema)
    with tempfile.TemporaryDirectory() as folder:
        # The sweeper writes a multirun.yaml that nobody asked for.
        sys.argv[1:] = [*flags_first(arguments), f'hydra.sweep.dir="{folder}"']
        hydra.main(str(CONFIG_DIR), config_name, VERSION_BASE)(job)()
    common = set.intersection(*(set(overrides) for overrides, _ in jobs))
    rows = []
    for number, (overrides, code) in enumerate(jobs):
        differing = " ".join(
            text.lstrip("+") for text in overrides if text not in common
        )
        directory, loss = "-", None
        if outcome and code != WRONG_DATA:
            words = [*_presets(flags), *overrides]
            directory, loss = outcome(check_command_line(words, config_name, schema))
        # A job that was refused has the directory of another run, and its loss.
        shown = "-" if code or loss is None else f"{loss:.4f}"
        rows.append([str(number), differing, str(code), shown, directory])
    headers = ["job", "overrides", "exit code", "eval loss", "run.dir"]
    print_table(rows, headers, "sweep")
    return next((code for _, code in jobs if code), 0)


def _presets(flags: Namespace) -> list[str]:
    """Return the flags that tell a job where its presets are."""
    words = ["--config-name", flags.config_name] if flags.config_name else []
    return words + (["--config-dir", flags.config_dir] if flags.config_dir else [])


def _run(flags: Namespace, overrides: list[str]) -> int:
    """Run one job in a process of its own, and return its exit code.

    A signal to stop reaches the job too, which saves; the sweep ends with it.
    """
    spec = sys.modules["__main__"].__spec__
    command = ["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]]
    log.info("sweep: %s", " ".join(overrides) or "(no overrides)")
    process = subprocess.Popen([sys.executable, *command, *_presets(flags), *overrides])
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        if number == signal.SIGTERM:  # Ctrl-C reaches the job by itself
            process.send_signal(number)

    previous_handlers = {
        n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)
    }
    code = process.wait()
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)
    code = 128 - code if code < 0 else code  # as a shell has it: 134 for an abort
    if stopped:
        sys.exit(code or 128 + stopped[0])
    if code:
        log.warning("sweep: exit code %d of %s", code, " ".join(overrides))
    return code
