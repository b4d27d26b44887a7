"""The errors that Longhaul raises.

ConfigError: the config has mistakes; `mistakes` lists each with key, value and rule.
DataError: data, a checkpoint or a record is missing or damaged.
Exit: the program cannot go on; `code` is the exit code of a command.
"""

from data.errors import DataError as DataError
from data.errors import Mistake as Mistake
from train.errors import ConfigError as ConfigError
from train.errors import Exit as Exit
