"""What every door of the program shares: `python -m train` and its like.

A door is a function of its config that returns an exit code:

    def main(config: Config) -> int: ...

    if __name__ == "__main__":
        run_command(main, "train")

Hydra composes the config from `configs/<name>.yaml` and the command line, wherever
the command is run from; help, `--cfg job` and `--multirun` are Hydra's. The function
runs outside Hydra, on frozen dataclasses, once everything has been checked. Nothing
here imports jax, and Hydra writes no files.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from train.cli.compose import (
    CONFIG_DIR,
    VERSION_BASE,
    Validate,
    check_command_line,
    register,
)
from train.cli.flags import flags_first, is_sweep, parse_flags, quote_text
from train.cli.rules import validate as validate_rules
from train.cli.rules import without_effect
from train.cli.schema import load, read_yaml, to_yaml
from train.config import Config
from train.errors import STOPPED, WRONG_CONFIG, WRONG_DATA, ConfigError, Exit

__all__ = [
    "check_command_line",
    "compose",
    "load",
    "read_yaml",
    "run_command",
    "to_yaml",
]

log = logging.getLogger(__name__)


def run_command(
    main: Callable[[Any], int | None],
    config_name: str = "train",
    schema: type = Config,
    validate: Validate = validate_rules,
    chosen: Sequence[str] = (),
) -> NoReturn:
    """Run a door on the arguments of this process, and exit with its code.

    Args:
        main: takes the config; its result, None being 0, is the exit code. ConfigError
            becomes 78, data.errors.DataError 65, Exit its own, all without a traceback.
        config_name: root file in `configs/`.
        schema: the dataclass that `main` takes.
        validate: gives the mistakes of such a config; it has the right types already.
        chosen: choices of groups that the schema holds for.
    """
    sys.exit(_run(main, config_name, schema, validate, chosen))


def compose(
    overrides: Sequence[str], config_name: str = "train", schema: type = Config
) -> Any:
    """Give the config that a command line means, its values unchecked."""
    register(schema)
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base=VERSION_BASE):
        return load(hydra.compose(config_name, list(overrides)), schema)


def configure_logging() -> None:
    """Send logs to stderr: ours from INFO on, other libraries' from WARNING on."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
    for package in ("train", "model", "data", "launch", "__main__"):
        logging.getLogger(package).setLevel(logging.INFO)


def _run(
    main: Callable[[Any], int | None],
    config_name: str,
    schema: type,
    validate: Validate,
    chosen: Sequence[str],
) -> int:
    configure_logging()
    try:
        arguments = quote_text(sys.argv[1:], schema)
        check_command_line(arguments, config_name, schema, validate, chosen)
        flags = parse_flags(arguments)
    except ConfigError as e:
        print(e, file=sys.stderr)
        return WRONG_CONFIG
    configs: list[Any] = []
    codes: list[int] = []

    def job(cfg: DictConfig) -> None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            codes.append(_run_job(flags, list(HydraConfig.get().overrides.task)))
        else:
            configs.append(load(cfg, schema))

    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = flags_first(arguments)
        if is_sweep(flags):
            # The sweeper writes a multirun.yaml that nobody asked for.
            sys.argv.append(f'hydra.sweep.dir="{folder}"')
        hydra.main(str(CONFIG_DIR), config_name, VERSION_BASE)(job)()
    if not configs:  # a sweep, or --help and the like
        return next((code for code in codes if code), 0)
    return _call(main, configs[0])


def _call(main: Callable[[Any], int | None], config: Any) -> int:
    if isinstance(config, Config):
        for warning in without_effect(config):
            log.warning(warning)
    try:
        return main(config) or 0
    except ConfigError as e:
        print(e, file=sys.stderr)
        return WRONG_CONFIG
    except Exit as e:
        print(e, end="\n" * bool(str(e)), file=sys.stderr)
        return e.code
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # who read our results has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as e:
        from data.errors import DataError

        if not isinstance(e, DataError):
            raise
        print(e, file=sys.stderr)
        return WRONG_DATA


def _run_job(flags: Namespace, overrides: list[str]) -> int:
    """Run one job of a sweep in a process of its own, and give its exit code.

    A signal to stop reaches the job too, which saves; the sweep ends with it.
    """
    spec = sys.modules["__main__"].__spec__
    door = ["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]]
    passed = ["--config-name", flags.config_name] if flags.config_name else []
    passed += ["--config-dir", flags.config_dir] if flags.config_dir else []
    log.info("sweep: %s", " ".join(overrides) or "(no overrides)")
    process = subprocess.Popen([sys.executable, *door, *passed, *overrides])
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        if number == signal.SIGTERM:  # Ctrl-C reaches the job by itself
            process.send_signal(number)

    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    code = process.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    code = 128 - code if code < 0 else code  # as a shell has it: 134 for an abort
    if stopped:
        sys.exit(code or 128 + stopped[0])
    if code:
        log.warning("sweep: exit code %d of %s", code, " ".join(overrides))
    return code
