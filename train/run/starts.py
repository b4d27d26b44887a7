"""Read the records of a run's starts, which run/this_start.py writes.

`config.yaml` is the config of the first start and is never rewritten. Start n writes
`starts/<n>.yaml`: the keys that differ from the first start, the fingerprints of its
data, the schedule's length, the run's identity, the machine, and the versions of the
libraries that determine what a step computes. If `config.yaml` or all of `starts/` is
missing, the newest checkpoint provides the values. run/continuation.py decides whether
a start may continue.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from etils import epath

from data.config import DataConfig
from data.errors import DataError, Mistake
from data.names import numbers_in
from data.program import own_file
from data.sources import Sources
from data.storage import StorageError
from train.cli.schema import read_yaml
from train.config import Config
from train.errors import ConfigError
from train.identity import config_differences
from train.records import damaged, read_record, record_or_warn
from train.run.digests import newest_description
from train.run.folder import access_error, check_layout, check_store, run_folder
from train.run.metrics import read_events

log = logging.getLogger(__name__)

_DESCRIPTION_KEYS = ("data_fingerprints", "schedule_steps", "run_id")
_START_REMEDY = (
    "Put it back from a copy of the run. If there is none, delete it: then the record "
    "of the previous start counts, and the changes of this one must be given again."
)
_START_TYPES = {"changes": dict, "data_fingerprints": dict, "own_file": dict}
_START_TYPES |= {"schedule_steps": int, "step": int}
_RESULTS_REMEDY = (
    "It counts as missing, so the next start of the run scores its last checkpoint "
    "again and writes new results."
)


def check_data(path: epath.Path, sources: Sources) -> None:
    """Compare the fingerprints of the data with those that the run has recorded.

    Raises:
        DataError: they differ.
    """
    recorded = newest_start(path).get("data_fingerprints")
    if recorded is None:
        return
    lines = [
        f"  {name}: was {recorded.get(name, 'not there')}, now {current or 'not there'}"
        for name, current in {**dict.fromkeys(recorded), **sources.fingerprints}.items()
        if recorded.get(name) != current
    ]
    if lines:
        raise DataError(
            f"{path}: the run was started on other data than {sources.path}, whose "
            f"fingerprint differs:\n"
            + "\n".join(lines)
            + "\nbring that data back, or start another run.name"
        )


def newest_start(path: epath.Path, step: int | None = None) -> dict[str, Any]:
    """Return the record of the last start, or of the last that can have trained `step`.

    A start can have trained `step` if it restored this step or an earlier one. Returns
    {} if there is none. If `starts/` has no record, the values come from the newest
    checkpoint, without the machine.
    """
    numbers = start_numbers(path)
    if not numbers:
        return _start_of_newest_checkpoint(path)
    if step is not None:
        restored_steps = {
            event["start"]: event["step"]
            for event in read_events(path)
            if event["event"] == "restore" and isinstance(event.get("step"), int)
        }
        numbers = [n for n in numbers if restored_steps.get(n, step + 1) <= step]
    if not numbers:
        return {}
    file = path / "starts" / f"{numbers[-1]}.yaml"
    start = read_record(file, _START_REMEDY) or {}
    for key, kind in _START_TYPES.items():
        if not isinstance(start.get(key), kind | None):
            damage = f"its {key} must be a {kind.__name__}"
            raise damaged(file, damage, _START_REMEDY)
    return {**start, "changes": start.get("changes") or {}}


def start_numbers(path: epath.Path) -> list[int]:
    """Return the numbers of the starts that left a record, ascending."""
    return numbers_in(file.stem for file in (path / "starts").glob("*.yaml"))


def _start_of_newest_checkpoint(path: epath.Path) -> dict[str, Any]:
    """Return the record of the start that saved the newest checkpoint."""
    config, description = newest_described_config(path)
    if config is None:
        return {}
    file = path / "config.yaml"
    changes = config_differences(read_yaml(file), config) if file.exists() else []
    return {
        "changes": {change.key: yaml_value(change.new) for change in changes},
        **{key: description.get(key) for key in _DESCRIPTION_KEYS},
    }


def newest_described_config(
    path: epath.Path, run_id: str | None = None
) -> tuple[Config | None, dict[str, Any]]:
    """Return the newest checkpoint's config (None if missing) and description."""
    step, description = newest_description(path / "checkpoints", run_id)
    if "config" not in description:
        return None, description
    folder = path / "checkpoints" / str(step)
    return read_yaml(folder, text=description["config"]), description


def first_config(path: epath.Path) -> Config | None:
    """Return the config of a run's first start; None if there was no start.

    If `config.yaml` is missing, this is the config of the newest checkpoint.
    """
    file = path / "config.yaml"
    if file.exists():
        return read_yaml(file)
    return newest_described_config(path, recorded_run_id(path))[0]


def document_start_of(path: epath.Path, data: DataConfig) -> bool | None:
    """Return data.document_start of a start with this section in a run's folder.

    The command line's value counts, then that of the run, then the default.

    Raises:
        ConfigError, DataError: the records of the run are damaged.
        Exit: the store of the run does not answer.
    """
    check_store(path)
    if data.document_start is not None:
        return data.document_start
    try:
        check_layout(path)
        original = first_config(path)
        changes = newest_start(path).get("changes", {})
    except StorageError as error:
        raise access_error(str(path), error) from error
    if original is None:
        return True if data.document_mask else None
    return changes.get("data.document_start", original.data.document_start)


def is_recorded(path: epath.Path) -> bool:
    """Return whether both config.yaml and records of starts exist."""
    return (path / "config.yaml").exists() and any((path / "starts").glob("*.yaml"))


def recorded_run_id(path: epath.Path) -> str | None:
    """Return the identity of a run; None if no start has recorded it."""
    return newest_start(path).get("run_id")


def existing_run(directory: str, key: str = "run.dir") -> epath.Path:
    """Return the folder of an existing run.

    Raises:
        ConfigError: there is no run; the message names `key`.
        DataError: an entry of the run is a folder instead of a file, or the reverse.
        Exit: the store of the run does not answer.
    """
    folder = run_folder(directory, key)
    check_store(folder)
    check_layout(folder)
    if not (folder / "config.yaml").exists():
        rule = f"must name the directory of a run; there is no {folder}/config.yaml"
        raise ConfigError([Mistake(key, directory, rule)])
    return folder


def read_run(
    directory: str | None, step: int | None = None, schema: type[Config] | None = None
) -> Config:
    """Return the config of the last start, or of the last that can have trained `step`.

    `schema` is that of `read_yaml`.

    Raises:
        ConfigError: run.dir is missing or holds no run, or the run has parts that
            `schema` lacks.
    """
    if not directory:
        rule = "must name the directory of a run, say run.dir=runs/base"
        raise ConfigError([Mistake("run.dir", directory, rule)])
    folder = existing_run(directory)
    start = newest_start(folder, step)
    with explain_missing_parts(start, directory):
        config = read_yaml(folder / "config.yaml", schema, start.get("changes", {}))
    return replace(config, run=replace(config.run, dir=directory))


@contextmanager
def explain_missing_parts(start: Mapping[str, Any], directory: str) -> Iterator[None]:
    """Name the user's file that a command lacks, if a config cannot be read without it.

    `start` is the record of a start of the run in the directory.
    """
    try:
        yield
    except ConfigError:
        if (own := start.get("own_file")) and own_file() is None:
            raise ConfigError([other_file_mistake(directory, own)]) from None
        raise


def other_file_mistake(directory: str, own: Mapping[str, str]) -> Mistake:
    """Return the mistake of a command that was not started by the run's own file."""
    rule = f"was started by {own['name']}, which adds parts of its own. Use it for all "
    rule += f"commands on this run: python {own['name']} <command> ..."
    return Mistake("run.dir", directory, rule)


def read_results(path: epath.Path) -> dict[str, Any]:
    """Return the results of a finished run; {} if they are missing or damaged."""
    file = path / "results.json"
    results = record_or_warn(file, _RESULTS_REMEDY) or {}
    if results and not isinstance(results.get("step"), int):
        log.warning("%s", damaged(file, "does not say its step", _RESULTS_REMEDY))
        return {}
    return results


def yaml_value(value: object) -> object:
    """Return a config value in the form that records of starts use."""
    if isinstance(value, list | tuple):
        return [yaml_value(member) for member in value]
    return value if isinstance(value, int | float | None) else str(value)
