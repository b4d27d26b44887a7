"""Private and undocumented API of Hydra, OmegaConf, argparse and atexit.

Each function states the version that it was checked with. Most of them also say why no
public API is enough.
"""

import argparse
import atexit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig


def flags_parser() -> argparse.ArgumentParser:
    """Return the parser of Hydra's flags (Hydra 1.3.8, which has no public parser)."""
    return get_args_parser()


def flag_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the flags of a parser (Python 3.11 to 3.13 have no public list)."""
    return parser._actions


class _Parser(OverridesParser):
    """Hydra's parser, whose errors are all HydraExceptions.

    Hydra 1.3.8 lets errors of Python pass: a number of more than 4,300 digits is a
    ValueError, and deep nesting a RecursionError.
    """

    def parse_rule(self, s: str, rule_name: str) -> Any:
        """Return what a rule of the grammar makes of a text."""
        try:
            return super().parse_rule(s, rule_name)
        except RecursionError:
            raise HydraException("it is nested too deeply") from None
        except ValueError as error:
            raise HydraException(str(error).split(";")[0]) from None


def override_parser(loader: Any = None) -> OverridesParser:
    """Return Hydra's parser of overrides (Hydra 1.3.8, where it is undocumented).

    Sweeps over groups need the loader.
    """
    return _Parser.create(config_loader=loader)


def config_loader() -> Any:
    """Return Hydra's loader of presets; Hydra must be initialised.

    Hydra 1.3.8. If `hydra.compose` said which preset sets a key, and which choice is
    wrong, this function and the next three could be deleted.
    """
    return GlobalHydra.instance().config_loader()


def search_folder_first(folder: Path) -> None:
    """Put a folder of presets first in Hydra's search path (Hydra 1.3.8)."""
    loader = config_loader()
    anchor = SearchPathQuery(provider="schema")
    path = f"file://{folder.resolve()}"
    loader.config_search_path.prepend("command-line", path, anchor)
    loader.repository.initialize_sources(loader.config_search_path)


def defaults_list(loader: Any, config_name: str, choices: Sequence[str]) -> Any:
    """Return the presets included by a root config and by choices (Hydra 1.3.8)."""
    return loader.compute_defaults_list(config_name, [*choices], RunMode.RUN)


def load_preset(loader: Any, path: str) -> Any:
    """Return one preset with its `config` and `path` (Hydra 1.3.8)."""
    return loader.repository.load_config(path)


def node_of(tree: DictConfig, key: str) -> Any:
    """Return the node at a dotted key, or None if there is none.

    OmegaConf 2.3. `OmegaConf.select` would resolve interpolations.
    """
    node: Any = tree
    for name in key.split(".") if key else ():
        node = node._get_node(name, False) if isinstance(node, DictConfig) else None
    return node


def run_exit_functions() -> None:
    """Call all functions registered with `atexit` (Python 3.11 to 3.13)."""
    atexit._run_exitfuncs()
