"""Compose presets, which are the YAML files under `configs/`.

Hydra merges the presets' plain values over the defaults of the dataclasses. Types and
bounds are checked after all values have been set (`train/cli/schema.py`).
"""

import functools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from data.errors import Mistake
from train.cli.compat import (
    config_loader,
    defaults_list,
    load_preset,
    node_of,
    search_folder_first,
)

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
VERSION_BASE = "1.3"
# Hydra must write no files, because this project manages each run's directory.
_NO_FILES = {
    "output_subdir": None,
    "run": {"dir": "."},
    "sweep": {"dir": ".", "subdir": "."},
}


def register(schema: type) -> None:
    """Store the defaults of a dataclass as `schema`, the base of all root configs."""
    node = OmegaConf.create({**asdict(schema()), "hydra": _NO_FILES})
    ConfigStore.instance().store(name="schema", node=node)


@contextmanager
def search_path(schema: type, folder: str | None) -> Iterator[None]:
    """Initialise Hydra to search the user's folder, if any, and then `configs/`."""
    register(schema)
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base=VERSION_BASE):
        if folder and os.path.isdir(folder):  # noqa: PTH112
            search_folder_first(Path(folder))
        yield


class Presets:
    """The presets of one command, to be used inside `search_path`.

    choices: the default choice of each group of the command.
    groups: the names of the groups in which users choose a preset.
    """

    def __init__(
        self, config_name: str, schema: type, default_choices: Sequence[str]
    ) -> None:
        self.loader = config_loader()
        self._config_name = config_name
        self._schema = schema
        self._default_choices = default_choices
        self._composed: dict[tuple[str, ...], tuple[DictConfig, list[Mistake]]] = {}
        self._options: dict[str, list[str]] = {}
        self.choices: dict[str, Any] = {}
        with suppress(Exception):  # `compose` reports the error
            self.choices = self._defaults_list(()).overrides.known_choices
        self.groups = [group for group in self.choices if "/" not in group]

    def options(self, group: str) -> list[str]:
        """Return the choices of a group, or an empty list if there is no such group."""
        if "." in group:
            return []
        if group not in self._options:  # each query copies Hydra's whole cache
            self._options[group] = []
            with suppress(OSError):  # a name that is too long for a file
                self._options[group] = self.loader.get_group_options(group)
        return self._options[group]

    def compose(self, choices: Sequence[str]) -> tuple[DictConfig, list[Mistake]]:
        """Return the values set by choices such as `model=llama3_8b`, and mistakes."""
        key = tuple(choices)
        if key not in self._composed:  # jobs of a sweep often share their choices
            self._composed[key] = self._compose(choices)
        tree, mistakes = self._composed[key]
        return tree.copy(), mistakes

    def _compose(self, choices: Sequence[str]) -> tuple[DictConfig, list[Mistake]]:
        try:
            overrides = self._with_default_choices(choices)
            tree = hydra.compose(self._config_name, overrides, return_hydra_config=True)
            OmegaConf.set_struct(tree, None)
            return tree, []
        except Exception as error:
            failure = Mistake(self._config_name, "", hydra_message(error))
        valid_choices = list[str]()
        mistakes = list[Mistake]()
        for choice in choices:
            try:
                self._defaults_list([choice])
                valid_choices.append(choice)
            except Exception as error:
                key, _, value = choice.partition("=")
                message = hydra_message(error)
                rule = f"{message}\nin the file of {choice}, or one that it names"
                mistakes.append(Mistake(key, value, rule))
        if not mistakes:  # each preset is valid alone, but their combination is not
            return OmegaConf.create(asdict(self._schema())), [failure]
        tree, further_mistakes = self.compose(valid_choices)
        return tree, mistakes + further_mistakes

    def source_file(self, key: str, choices: Sequence[str]) -> str | None:
        """Return the file of the last preset that sets a key, or None."""
        for default in reversed(self._defaults_list(choices).defaults):
            path = str(default.config_path)
            package = default.package or ""
            if path == "schema" or path.startswith("hydra/"):
                continue
            preset = load_preset(self.loader, path)
            inner_key = key.partition("[")[0].removeprefix(
                f"{package}." * bool(package)
            )
            if node_of(preset.config, inner_key) is not None:
                return f"{preset.path.removeprefix('file://')}/{path}.yaml"
        return None

    def _defaults_list(self, choices: Sequence[str]) -> Any:
        return defaults_list(
            self.loader, self._config_name, self._with_default_choices(choices)
        )

    def _with_default_choices(self, choices: Sequence[str]) -> list[str]:
        groups = {choice.partition("=")[0] for choice in choices}
        defaults = self._default_choices
        return [*(c for c in defaults if c.partition("=")[0] not in groups), *choices]


# Only valid without --config-dir, which is not part of the cache's key.
cached_presets = functools.cache(Presets)


def hydra_message(error: BaseException) -> str:
    """Return Hydra's message without its search path, links and line breaks."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    text = re.split(r"Config search path|Search path:|See https", text)[0]
    return " ".join(text.split())
