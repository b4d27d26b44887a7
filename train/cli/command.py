"""Run a command such as `python -m train` on its config.

A command is a function of its config that returns an exit code:

    def main(config: Config) -> int: ...

    COMMAND = Command(main, "train")

    if __name__ == "__main__":
        run_command(COMMAND)

Hydra composes the config from `configs/<name>.yaml` and the command line, and handles
help, `--cfg` and `--multirun`. The function takes its config as a frozen
dataclass without mistakes. Nothing here imports jax, and Hydra writes no files.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from data.errors import DataError
from data.program import PACKAGES, PREFIX, with_shown_commands
from train.cli.compose import Validate, check_command_line
from train.cli.compose import compose as compose
from train.cli.flags import flags_first, is_sweep, parse_flags
from train.cli.help import help_text
from train.cli.leaving import run_and_leave
from train.cli.presets import CONFIG_DIR, VERSION_BASE, register
from train.cli.quoting import quote_text
from train.cli.rules import config_mistakes
from train.cli.schema import config_yaml
from train.cli.unread_keys import unread_key_warnings
from train.config import Config
from train.errors import CRASHED, STOPPED, ConfigError, Exit, exit_code
from train.masking import mask_streams

# Maps the config of a job to its run.dir and its last evaluation loss.
Outcome = Callable[[Any], tuple[str, float | None]]
# Returns the dataclass of a command's keys, with those of parts that a user added.
Extend = Callable[[type], type]
# Returns a dataclass of keys, and the arguments without those that choose it.
ReadSchema = Callable[[list[str], Extend], tuple[type, list[str]]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Command:
    """A command of this program.

    main: takes the config and returns the exit code; None means 0. A ConfigError exits
        with 78, a DataError with 65, and an Exit with its code, without traceback.
    config_name: the root file in `configs/`.
    schema: the dataclass that `main` takes.
    validate: lists the broken rules between keys, after types and bounds have been
        checked.
    default_choices: returns `group=choice` pairs that the arguments may override.
    outcome: returns a job's directory and loss, for the table after a sweep.
    read_schema: returns a schema to use instead of `schema`.
    trains: whether the command trains. Then it exits without waiting for threads.
    """

    main: Callable[[Any], int | None]
    config_name: str = "train"
    schema: type = Config
    validate: Validate = config_mistakes
    default_choices: Callable[[list[str]], Sequence[str]] = lambda arguments: ()
    outcome: Outcome | None = None
    read_schema: ReadSchema | None = None
    trains: bool = False


def run_command(command: Command, extend: Extend = lambda schema: schema) -> NoReturn:
    """Run a command on the arguments of this process, and exit with its code.

    `extend` adds the keys of a user's parts to a dataclass of keys.
    """
    if command.trains:
        run_and_leave(lambda: _run(command, extend))
    _run(command, extend)


def _run(command: Command, extend: Extend) -> NoReturn:
    config_name = command.config_name
    validate = command.validate
    use_utf8()
    configure_logging()
    try:
        arguments = sys.argv[1:]
        default_choices = command.default_choices(arguments)
        schema = extend(command.schema)
        if command.read_schema:
            schema, arguments = command.read_schema(arguments, extend)
        arguments = quote_text(arguments, schema)
        config = check_command_line(
            arguments, config_name, schema, validate, default_choices
        )
        flags = parse_flags(arguments)
        hydra_only_prints = flags.hydra_help or flags.cfg or flags.info
        code: int | None = 0
        if is_sweep(flags):
            from train.cli.sweep import run_sweep

            code = run_sweep(arguments, flags, config_name, schema, command.outcome)
        elif flags.cfg == "job" and not flags.package:
            print(config_yaml(config), end="", flush=True)
            if mistakes := validate(config):
                raise ConfigError(mistakes)
        elif flags.cfg == "schema":
            from train.cli.json_schema import json_schema_text  # imports pydantic

            print(json_schema_text(schema), flush=True)
        elif flags.help:
            print(help_text(config_name, schema, default_choices, flags.config_dir))
        elif hydra_only_prints or flags.shell_completion:
            import hydra

            register(schema)
            sys.argv[1:] = flags_first(arguments)
            hydra.main(str(CONFIG_DIR), config_name, VERSION_BASE)(lambda cfg: None)()
        else:
            if issubclass(schema, Config):
                for warning in unread_key_warnings(config):
                    log.warning(warning)
            code = command.main(config)
    except (ConfigError, DataError, Exit) as error:
        text = with_shown_commands(str(error))
        print(text, end="\n" * bool(text), file=sys.stderr)
        code = exit_code(error)
    except KeyboardInterrupt:
        code = STOPPED
    except BrokenPipeError:  # the reader of stdout has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except Exception as error:
        from data.storage import StorageError, is_client_error

        if not is_client_error(error):
            raise
        print(StorageError("A remote server", error, "used"), file=sys.stderr)
        code = CRASHED  # another start may succeed
    sys.exit(code or 0)


class _Formatter(logging.Formatter):
    """Formats records, with commands as the user types them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return with_shown_commands(super().format(record))


def use_utf8() -> None:
    """Start this process again in Python's UTF-8 mode, unless file names are UTF-8.

    In the locale C, Python would read other bytes from names than the file system has.
    """
    if sys.getfilesystemencoding().lower() == "utf-8" or sys.flags.utf8_mode:
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def configure_logging() -> None:
    """Log to stderr: INFO and above of this project, WARNING and above of libraries.

    From here on, secrets are masked in all that this process prints.
    """
    mask_streams()
    handler = logging.StreamHandler(sys.stderr)
    log_format = "%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(_Formatter(log_format, "%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    # gcsfs logs a traceback for each failed request; commands say what has failed.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    for package in PACKAGES:
        logging.getLogger(PREFIX + package).setLevel(logging.INFO)
    logging.getLogger("__main__").setLevel(logging.INFO)
