"""The presets, which are the YAML files under `configs/`.

Hydra composes them as plain values, on top of the defaults of the dataclasses. Types
and bounds are checked after all values are set (`train/cli/schema.py`).
"""

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from train.cli.compat import (
    config_loader,
    defaults_list,
    load_preset,
    node_of,
    search_folder_first,
)
from train.errors import Mistake

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
VERSION_BASE = "1.3"
# Hydra writes no files: a run has its own directory.
_NO_FILES = {
    "output_subdir": None,
    "run": {"dir": "."},
    "sweep": {"dir": ".", "subdir": "."},
}


def register(schema: type) -> None:
    """Store the defaults of a dataclass as `schema`, with which root configs start."""
    node = OmegaConf.create({**asdict(schema()), "hydra": _NO_FILES})
    ConfigStore.instance().store(name="schema", node=node)


@contextmanager
def search_path(schema: type, folder: str | None) -> Iterator[None]:
    """Let Hydra find `configs/`, and a folder of the user."""
    register(schema)
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base=VERSION_BASE):
        if folder and Path(folder).is_dir():
            search_folder_first(Path(folder))
        yield


class Presets:
    """The presets of one command; use it inside `search_path`.

    choices: the default choice of each group that the command has.
    groups: the groups that users choose from.
    """

    def __init__(self, config_name: str, schema: type, chosen: Sequence[str]) -> None:
        self.loader = config_loader()
        self._config_name, self._schema, self._chosen = config_name, schema, chosen
        self._composed: dict[tuple[str, ...], tuple[DictConfig, list[Mistake]]] = {}
        self._options: dict[str, list[str]] = {}
        self.choices: dict[str, Any] = {}
        with suppress(Exception):  # `compose` reports why
            self.choices = self._defaults(()).overrides.known_choices
        self.groups = [group for group in self.choices if "/" not in group]

    def options(self, group: str) -> list[str]:
        """List the choices of a group; empty if there is no such group."""
        if "." in group:
            return []
        if group not in self._options:  # Hydra copies its cache for it
            self._options[group] = self.loader.get_group_options(group)
        return self._options[group]

    def compose(self, choices: Sequence[str]) -> tuple[DictConfig, list[Mistake]]:
        """Compose choices such as `model=llama3_8b`, except presets with mistakes.

        Returns the values, and the mistakes.
        """
        key = tuple(choices)
        if key not in self._composed:  # jobs of a sweep share it
            self._composed[key] = self._compose(choices)
        tree, mistakes = self._composed[key]
        return tree.copy(), mistakes

    def _compose(self, choices: Sequence[str]) -> tuple[DictConfig, list[Mistake]]:
        try:
            words = self._with_chosen(choices)
            tree = hydra.compose(self._config_name, words, return_hydra_config=True)
            OmegaConf.set_struct(tree, None)
            return tree, []
        except Exception as error:
            failure = Mistake(self._config_name, "", why(error))
        good, mistakes = list[str](), list[Mistake]()
        for choice in choices:
            try:
                self._defaults([choice])
                good.append(choice)
            except Exception as error:
                key, _, value = choice.partition("=")
                rule = f"{why(error)}\nin the file of {choice}, or one that it names"
                mistakes.append(Mistake(key, value, rule))
        if not mistakes:  # each preset can be read, but not all together
            return OmegaConf.create(asdict(self._schema())), [failure]
        tree, more = self.compose(good)
        return tree, mistakes + more

    def file_with(self, key: str, choices: Sequence[str]) -> str | None:
        """Return the file of the preset that set a key, the last one that has it."""
        for default in reversed(self._defaults(choices).defaults):
            path, package = str(default.config_path), default.package or ""
            if path == "schema" or path.startswith("hydra/"):
                continue
            preset = load_preset(self.loader, path)
            inner = key.partition("[")[0].removeprefix(f"{package}." * bool(package))
            if node_of(preset.config, inner) is not None:
                return f"{preset.path.removeprefix('file://')}/{path}.yaml"
        return None

    def _defaults(self, choices: Sequence[str]) -> Any:
        chosen = self._with_chosen(choices)
        return defaults_list(self.loader, self._config_name, chosen)

    def _with_chosen(self, choices: Sequence[str]) -> list[str]:
        groups = {text.partition("=")[0] for text in choices}
        chosen = [c for c in self._chosen if c.partition("=")[0] not in groups]
        return [*chosen, *choices]


read_once = functools.cache(Presets)  # valid if only `configs/` is searched


def why(error: BaseException) -> str:
    """Return Hydra's message without its search path, links and line breaks."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    text = re.split(r"Config search path|Search path:|See https", text)[0]
    return " ".join(text.split())
