"""Track a run with Weights & Biases, offline by default.

A run has one id, in `<run_dir>/wandb/run_id`. Online, the server's last step says which
lines it lacks, so that no step appears twice.
"""

import logging
import netrc
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.run.trackers.writer import Line, Writer

_logger = logging.getLogger(__name__)
FINISH_TIMEOUT_S = 20.0
_QUIET_SETTINGS = {
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
    "init_timeout": FINISH_TIMEOUT_S,
    # At exit wandb waits for its uploads again, by default forever.
    "finish_timeout": FINISH_TIMEOUT_S,
}


class WandbWriter(Writer):
    """A run of W&B, with all its files in the folder."""

    name = "wandb"

    def open(self, folder: Path, marked: int) -> int:
        """Begin or resume the run; online, the server's last step replaces `marked`."""
        os.environ["WANDB_CACHE_DIR"] = f"{folder}/cache"  # replaces ~/.cache/wandb
        os.environ["WANDB_SILENT"] = "true"  # wandb's login ignores _QUIET_SETTINGS
        # Otherwise, on a full disk, each line that wandb logs to the folder prints a
        # traceback.
        logging.raiseExceptions = False
        import wandb  # takes half a second

        mode = self._config.mode
        if mode == "online" and not _has_credentials():
            _logger.warning("wandb: no API key on this machine, so offline")
            mode = "offline"
        supported_settings = wandb.Settings.model_fields
        self._wandb: Any = wandb.init(
            project=self._config.project,
            name=self._run.name,
            id=self._run.run_id(self.name, lambda: secrets.token_hex(4)),
            resume="allow",
            mode="online" if mode == "online" else "offline",
            dir=str(folder.parent),
            config=self._run.config,
            settings=wandb.Settings(
                **{k: v for k, v in _QUIET_SETTINGS.items() if k in supported_settings}
            ),
        )
        self._wandb.define_metric("*", step_metric="step")
        return self._wandb.starting_step - 1 if mode == "online" else marked

    def write(self, lines: Sequence[Line]) -> None:
        """Log lines with our step; wandb's own step restarts at 0 when offline."""
        for step, values in lines:
            self._wandb.log({"step": step, **values}, step=step)

    def close(self) -> None:
        """Wait until wandb has finished."""
        self._wandb.finish()


def _has_credentials() -> bool:
    """Return whether wandb can log in without asking at the terminal."""
    if any(map(os.environ.get, ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))):
        return True
    base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = base.split("://")[-1].split("/")[0].split(":")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
