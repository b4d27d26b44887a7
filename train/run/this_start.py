"""One start of a run: its directory, config and data, and the records of them."""

import datetime
import json
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import yaml
from etils import epath

from data.program import PREFIX, ROOT
from data.sources import Sources
from data.storage import write_atomically
from train.cli.schema import config_yaml
from train.config import Config
from train.identity import config_differences
from train.run.starts import first_config, yaml_value
from train.run.versions import own_file_version, versions


@dataclass(frozen=True)
class ThisStart:
    """A start of a run, new or existing, that goes on in this process.

    path: the run's directory.
    config: the config of this start.
    sources: the data of this start.
    """

    path: epath.Path
    config: Config
    sources: Sources

    def record(
        self, number: int, schedule_steps: int, run_id: str | None = None, step: int = 0
    ) -> None:
        """Write `starts/<number>.yaml`, and `config.yaml` if it is missing.

        `step` is the step that the start continues.

        Raises:
            OSError: the folder cannot be written.
        """
        path = self.path
        config = self.config
        original = first_config(path) or config
        if not (path / "config.yaml").exists():
            write_atomically(path / "config.yaml", config_yaml(original))
        changes = config_differences(original, config)
        now = datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
        record = {
            "time": now.isoformat(),
            "host": socket.gethostname(),
            "processes": jax.process_count(),
            "devices": [str(device) for device in jax.devices()],
            "changes": {change.key: yaml_value(change.new) for change in changes},
            "data_fingerprints": self.sources.fingerprints,
            "schedule_steps": schedule_steps,
            "run_id": run_id,
            "step": step,
            "git_commit": _git_commit(),
            "python": platform.python_version(),
            "versions": versions(),
            "own_file": own_file_version(),
            "mesh": json.loads(json.dumps(asdict(config.mesh))),  # enums become strings
        }
        write_atomically(path / "starts" / f"{number}.yaml", yaml.safe_dump(record))

    def checkpoint_metadata(
        self,
        mesh: Mapping[str, int],
        schedule_steps: int,
        branch: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the JSON that is saved with a checkpoint.

        `branch` is the content of branch.json if the run is a branch.
        """
        return {
            "config": config_yaml(self.config),
            "data_fingerprint": self.sources.fingerprint,
            "data_fingerprints": self.sources.fingerprints,
            "schedule_steps": schedule_steps,
            "mesh": dict(mesh),
            "versions": versions(),
            **({} if branch is None else {"branch": branch}),
        }


# Puts into a run's directory what its first start continues, unless this has been done.
# The second argument is called whenever there is progress.
Begin = Callable[[ThisStart, Callable[[], object]], None]


def _git_commit() -> str | None:
    if PREFIX:  # A repository around an installed copy belongs to another project.
        return None
    describe = ["describe", "--always", "--dirty", "--abbrev=40"]
    command = ["git", "-C", str(ROOT), *describe]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
