"""The YAML files under `configs/`: which are drawn in, what they set, what is in them.

Hydra composes them as plain values: the dataclasses' defaults come first, types and
bounds are checked once all is set (`train/cli/schema.py`).
"""

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

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
    """Make `schema`, which each root config starts with, mean this one's defaults."""
    node = OmegaConf.create({**asdict(schema()), "hydra": _NO_FILES})
    ConfigStore.instance().store(name="schema", node=node)


@contextmanager
def search_path(schema: type, folder: str | None) -> Iterator[None]:
    """Let Hydra find `configs/`, and a folder of the user's own."""
    register(schema)
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base=VERSION_BASE):
        if folder and Path(folder).is_dir():
            loader: Any = GlobalHydra.instance().config_loader()
            path = f"file://{Path(folder).resolve()}"
            anchor = SearchPathQuery(provider="schema")
            loader.config_search_path.prepend("command-line", path, anchor)
            loader.repository.initialize_sources(loader.config_search_path)
        yield


class Presets:
    """The presets of one command, inside `search_path`.

    choices: what each group that the command knows has chosen by itself.
    """

    def __init__(self, config_name: str, schema: type, chosen: Sequence[str]) -> None:
        self.loader: Any = GlobalHydra.instance().config_loader()
        self._config_name, self._schema, self._chosen = config_name, schema, chosen
        self._composed: dict[tuple[str, ...], tuple[DictConfig, list[Mistake]]] = {}
        self._options: dict[str, list[str]] = {}
        self.choices: dict[str, Any] = {}
        with suppress(Exception):  # `compose` says why
            self.choices = self._defaults(()).overrides.known_choices
        # That people choose of:
        self.groups = [group for group in self.choices if "/" not in group]

    def options(self, group: str) -> list[str]:
        """List a group's choices; empty if it is none."""
        if "." in group:
            return []
        if group not in self._options:  # Hydra copies all that it has read for it
            self._options[group] = self.loader.get_group_options(group)
        return self._options[group]

    def compose(self, choices: Sequence[str]) -> tuple[DictConfig, list[Mistake]]:
        """Compose what is chosen; a choice of which nothing comes is left out.

        Args:
            choices: as typed, `model=llama3_8b`.
        """
        key = tuple(choices)
        if key not in self._composed:  # jobs of a sweep share it
            self._composed[key] = self._compose(choices)
        tree, mistakes = self._composed[key]
        return tree.copy(), mistakes

    def _compose(self, choices: Sequence[str]) -> tuple[DictConfig, list[Mistake]]:
        words = self._with_chosen(choices)
        try:
            tree = hydra.compose(self._config_name, words, return_hydra_config=True)
            OmegaConf.set_struct(tree, None)
            return tree, []
        except Exception as error:
            mistake = Mistake(self._config_name, "", why(error))
        good, mistakes = list[str](), list[Mistake]()
        for choice in choices:
            try:
                self._defaults([choice])
                good.append(choice)
            except Exception as error:
                key, _, value = choice.partition("=")
                rule = f"{why(error)}\nin the file of {choice}, or one that it names"
                mistakes.append(Mistake(key, value, rule))
        if not mistakes:  # each by itself, but not together
            return OmegaConf.create(asdict(self._schema())), [mistake]
        tree, more = self.compose(good)
        return tree, mistakes + more

    def file_with(self, key: str, choices: Sequence[str]) -> str | None:
        """Return the preset that set a key: the last one that has it."""
        for default in reversed(self._defaults(choices).defaults):
            path, package = str(default.config_path), default.package or ""
            if path == "schema" or path.startswith("hydra/"):
                continue
            preset = self.loader.repository.load_config(path)
            inner = key.partition("[")[0].removeprefix(f"{package}." * bool(package))
            if node_of(preset.config, inner) is not None:
                return f"{preset.path.removeprefix('file://')}/{path}.yaml"
        return None

    def _defaults(self, choices: Sequence[str]) -> Any:
        words = self._with_chosen(choices)
        return self.loader.compute_defaults_list(self._config_name, words, RunMode.RUN)

    def _with_chosen(self, choices: Sequence[str]) -> list[str]:
        groups = {text.partition("=")[0] for text in choices}
        return [c for c in self._chosen if c.partition("=")[0] not in groups] + [
            *choices
        ]


read_once = functools.cache(Presets)  # where `configs/` alone is searched


def node_of(tree: DictConfig, key: str) -> Any:
    """Return the node under a dotted key, its interpolations unresolved, or None."""
    node: Any = tree
    for name in key.split(".") if key else ():
        node = node._get_node(name, False) if isinstance(node, DictConfig) else None
    return node


def why(error: BaseException) -> str:
    """Return Hydra's message without its search path, links and line breaks."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    text = re.split(r"Config search path|Search path:|See https", text)[0]
    return " ".join(text.split())
