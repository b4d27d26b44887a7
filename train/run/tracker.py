"""Where metrics go besides `metrics.jsonl`: nowhere, or Weights & Biases.

A tracker is a courtesy. It never asks, never blocks and never breaks training: all
of wandb, its import included, happens on a thread of its own, and its first error is
one warning, after which the tracker is silent. All its files lie under
`<run_dir>/wandb/`. A run keeps one id for life, in `<run_dir>/wandb/run_id`.
"""

import logging
import netrc
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from etils import epath

from data.machine import is_remote
from train.config import TrackerConfig, TrackerName
from train.run.storage import upload

_logger = logging.getLogger(__name__)
_FINISH_TIMEOUT_S = 20.0
_QUIET = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "save_code": False,
    "symlink": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_viewer": True,
    "x_save_requirements": False,
    "init_timeout": _FINISH_TIMEOUT_S,
    # wandb waits for its uploads at exit once more, by default for ever.
    "finish_timeout": _FINISH_TIMEOUT_S,
}


class Tracker:
    """Takes metrics, returns at once, raises nothing. This one keeps none of them."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over the values of one step; steps never decrease."""

    def finish(self) -> None:
        """Wait a bounded time for what was handed over to be stored."""


def open_tracker(
    config: TrackerConfig,
    run_dir: epath.Path | Path,
    run_name: str,
    run_config: dict[str, Any],
    *,
    write: bool = True,
) -> Tracker:
    """Return the tracker that `config` names; it is usable at once.

    Online without an API key on this machine means offline, with a warning. For a
    remote run wandb works in a temporary folder that `finish` copies to
    `<run_dir>/wandb/`. `write` is False on every process but the first.
    """
    if not write or config.name == TrackerName.none:
        return Tracker()
    return _WandbTracker(config, epath.Path(run_dir), run_name, run_config)


class _WandbTracker(Tracker):
    def __init__(
        self,
        config: TrackerConfig,
        run_dir: epath.Path,
        run_name: str,
        run_config: dict[str, Any],
    ):
        self._config, self._run_dir = config, run_dir
        self._name, self._run_config = run_name, run_config
        self._queue: SimpleQueue[tuple[int, dict[str, float]] | None] = SimpleQueue()
        self._working = True
        self._thread = threading.Thread(target=self._work, daemon=True, name="wandb")
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._working:
            self._queue.put((step, dict(values)))

    def finish(self) -> None:
        self._queue.put(None)
        self._thread.join(_FINISH_TIMEOUT_S)
        if self._thread.is_alive() and self._working:
            _logger.warning(
                "wandb did not finish in %.0f s, going on", _FINISH_TIMEOUT_S
            )
        self._working = False

    def _work(self) -> None:
        try:
            remote = is_remote(self._run_dir)
            root = Path(tempfile.mkdtemp() if remote else self._run_dir).absolute()
            run = self._init(root)
            while (item := self._queue.get()) is not None:
                step, values = item
                # wandb's own step restarts at 0 in each offline session, and a
                # server drops steps at or below its last: ours goes on.
                run.log({"step": step, **values}, step=step)
            run.finish()
            if remote:
                upload(root / "wandb", self._run_dir / "wandb")
                shutil.rmtree(root, ignore_errors=True)
        # wandb may even raise SystemExit or its own KeyboardInterrupt.
        except BaseException as error:
            if self._working:
                self._working = False
                _logger.warning("wandb is off from here on: %s", _first_line(error))

    def _init(self, root: Path) -> Any:
        folder = root / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["WANDB_CACHE_DIR"] = str(folder / "cache")  # else ~/.cache/wandb
        os.environ["WANDB_SILENT"] = "true"  # the login does not ask the settings
        import wandb  # half a second, which those who turn it off do not pay

        mode = self._config.mode
        if mode == "online" and not _has_key():
            _logger.warning("wandb: no API key on this machine, so offline")
            mode = "offline"
        known = wandb.Settings.model_fields
        run = wandb.init(
            project=self._config.project,
            name=self._name,
            id=_run_id(self._run_dir),
            resume="allow",
            mode="online" if mode == "online" else "offline",
            dir=str(root),
            config=self._run_config,
            settings=wandb.Settings(**{k: v for k, v in _QUIET.items() if k in known}),
        )
        run.define_metric("*", step_metric="step")
        return run


def _run_id(run_dir: epath.Path) -> str:
    """Return the run's id for life, drawing it at the first start."""
    path = run_dir / "wandb" / "run_id"
    run_id = path.read_text().strip() if path.exists() else ""
    if not run_id:
        run_id = secrets.token_hex(4)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(run_id + "\n")
    return run_id


def _has_key() -> bool:
    """Whether wandb can log in without asking at the terminal."""
    if any(map(os.environ.get, ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))):
        return True
    base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = base.split("://")[-1].split("/")[0].split(":")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
