"""Begin a run with existing weights, from a folder or from another run.

The first start records the size and SHA-256 of each file of weights in the run's
`init_from.json`. A later start that reads the weights again refuses changed files.
"""

import json
from pathlib import Path
from typing import Any

from etils import epath

from data.errors import DataError
from data.storage import write_atomically
from train.core.optimizer.update import averages
from train.core.state import TrainState, make_finite_check
from train.distributed.processes import Cluster
from train.pretrained.compare import check_folder, weight_files
from train.pretrained.other_run import check_run, is_run, read_run_weights, sealed_files
from train.pretrained.read import read_folder
from train.records import damaged, read_record
from train.resolve.program import ConfiguredProgram
from train.run.digests import digests
from train.run.folder import run_folder
from train.units import few

RECORD = "init_from.json"
_RECORD_REMEDY = (
    "Delete it if init_from still holds what the run began with: it is written again."
)
_REMEDY = "Bring it back, or take another run.name"


def check_weights(path: str, program: ConfiguredProgram) -> dict[str, str]:
    """Compare weights with a model; return values that all processes must agree on.

    Raises:
        ConfigError: with every difference.
        DataError: with the name of a missing or damaged file.
    """
    return check_run(path, program) if is_run(path) else check_folder(path, program)


def start_from(path: str, program: ConfiguredProgram) -> TrainState:
    """Return the state of step 0 with the weights of a folder, or of another run.

    Vocabulary rows that the weights lack keep their random initial values.

    Raises:
        ConfigError: as in `check_weights`.
        DataError: as in `check_weights`, or if values of the weights are not finite.
    """
    read_weights = read_run_weights if is_run(path) else read_folder
    check_weights(path, program)
    state = read_weights(path, program)
    if program.state.optimizer.average is not None:
        average = averages(state.params)
        state = state._replace(optimizer=state.optimizer._replace(average=average))
    if names := make_finite_check(program.state, program.mesh)(state):
        raise DataError(
            f"init_from={path}: {few(names)}: there are values that are not finite, "
            f"which training would spread. Take other weights"
        )
    return state


def record_or_check_files(path: str, run: epath.Path, cluster: Cluster) -> None:
    """Record the digests of the weight files, or compare them with recorded digests.

    Each process hashes some of the files, and process 0 compares all digests.

    Args:
        path: the folder of weights, or the directory of another run.
        run: the directory of this run.
        cluster: the processes of this run.

    Raises:
        DataError: with the name of a file that has changed since the first start.
    """
    record = run / RECORD
    recorded = cluster.broadcast(lambda: _read_recorded_digests(record))
    try:
        files = sealed_files(path) if is_run(path) else recorded
        hashed = digests(
            run_folder(path),
            cluster.process,
            cluster.processes,
            names=files or weight_files(Path(path)),
        )
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}). {_REMEDY}") from error
    if cluster.processes > 1:
        texts = cluster.gather("init_from", json.dumps(hashed))
        hashed = {k: v for text in texts for k, v in json.loads(text).items()}

    def compare_or_record() -> None:
        if not recorded:
            text = json.dumps(hashed, indent=1, sort_keys=True)
            write_atomically(record, f"{text}\n")
        elif differing := [
            name
            for name in sorted(recorded.keys() | hashed.keys())
            if recorded.get(name) != hashed.get(name)
        ]:
            raise DataError(
                f"{path}/{differing[0]}: is not what the first start of this run read, "
                f"by its size and SHA-256 in {RECORD}. {_REMEDY}"
            )

    cluster.on_leader(compare_or_record)


def _read_recorded_digests(record: epath.Path) -> dict[str, Any]:
    """Return the recorded size and SHA-256 of each file; empty without a record."""
    record_values = read_record(record, _RECORD_REMEDY) or {}
    if not all(isinstance(digest, list) for digest in record_values.values()):
        raise damaged(record, "does not hold sizes and hashes", _RECORD_REMEDY)
    return record_values
