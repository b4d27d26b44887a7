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

from data.program import words_to_repeat
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
    """Run the jobs of a checked command line one by one, and print a table of results.

    The sweep continues after a failed job, but not after SIGINT or SIGTERM.

    Returns:
        The exit code of the first failed job, or 0.
    """
    jobs: list[tuple[list[str], int]] = []

    def run_job(cfg: DictConfig) -> None:
        overrides = list(HydraConfig.get().overrides.task)
        jobs.append((overrides, _run_process(flags, overrides)))

    register(schema)
    with tempfile.TemporaryDirectory() as folder:
        # Hydra's sweeper always writes a multirun.yaml; put it in a temporary folder.
        sys.argv[1:] = [*flags_first(arguments), f'hydra.sweep.dir="{folder}"']
        hydra.main(str(CONFIG_DIR), config_name, VERSION_BASE)(run_job)()
    shared = set.intersection(*(set(overrides) for overrides, _ in jobs))
    rows = []
    for number, (overrides, code) in enumerate(jobs):
        own = " ".join(t.lstrip("+") for t in overrides if t not in shared)
        directory = "-"
        loss = None
        if outcome and code != WRONG_DATA:
            argv = [*_preset_flags(flags), *overrides]
            directory, loss = outcome(check_command_line(argv, config_name, schema))
        # The directory of a failed job may hold a loss that another run has written.
        loss_text = "-" if code or loss is None else f"{loss:.4f}"
        rows.append([str(number), own, str(code), loss_text, directory])
    headers = ["job", "overrides", "exit code", "eval loss", "run.dir"]
    print_table(rows, headers, "sweep")
    return next((code for _, code in jobs if code), 0)


def _preset_flags(flags: Namespace) -> list[str]:
    """Return the flags that tell a job where its presets are."""
    values = {"--config-name": flags.config_name, "--config-dir": flags.config_dir}
    return [word for name, value in values.items() if value for word in (name, value)]


def _run_process(flags: Namespace, overrides: list[str]) -> int:
    """Run one job and return its exit code; SIGINT or SIGTERM also ends the sweep."""
    log.info("sweep: %s", " ".join(overrides) or "(no overrides)")
    process = subprocess.Popen([*words_to_repeat(), *_preset_flags(flags), *overrides])
    signals: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        signals.append(number)
        if number == signal.SIGTERM:  # the terminal sends Ctrl-C to the job itself
            process.send_signal(number)

    handlers = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM)}
    code = process.wait()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    code = 128 - code if code < 0 else code  # Shells report SIGABRT as 134.
    if signals:
        sys.exit(code or 128 + signals[0])
    if code:
        log.warning("sweep: exit code %d of %s", code, " ".join(overrides))
    return code
