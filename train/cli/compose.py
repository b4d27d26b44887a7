"""Check a whole command line before Hydra runs it.

By itself Hydra stops at the first mistake, with exit code 1. Here each override and
each preset is parsed by Hydra's own parser and loader and set by itself in a typed
tree, so that all mistakes are listed at once. What is right is then composed, and
the rules between keys (`train/cli/rules.py`) add theirs.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from train.cli.flags import flag_mistakes, is_sweep, parse_flags
from train.cli.rules import validate as validate_rules
from train.cli.schema import (
    did_you_mean,
    dotted_keys,
    has_key,
    in_table,
    load,
    schema_node,
    unknown_key,
    value_mistakes,
)
from train.config import Config
from train.errors import ConfigError, Mistake

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
VERSION_BASE = "1.3"
MAX_JOBS = 32  # of a sweep checked as a whole beforehand; each job checks itself again

Validate = Callable[[Any], list[Mistake]]


def register(schema: type) -> None:
    """Make `schema`, which each root config starts with, mean this dataclass."""
    ConfigStore.instance().store(name="schema", node=schema_node(schema))


def check_command_line(
    argv: Sequence[str],
    config_name: str = "train",
    schema: type = Config,
    validate: Validate = validate_rules,
    chosen: Sequence[str] = (),
) -> None:
    """Check the arguments of a command (`sys.argv[1:]`), of a sweep each value.

    With `--cfg` and the like, which only show the config, the rules between keys are
    left out.

    Args:
        argv: the arguments.
        config_name: root file in `configs/`.
        schema: the dataclass of all keys.
        validate: gives the mistakes between them.
        chosen: choices of groups that the schema holds for.

    Raises:
        ConfigError: with every mistake found.
    """
    flags = parse_flags(argv)
    found = flag_mistakes(flags)
    shows = flags.cfg or flags.help or flags.hydra_help or flags.info
    if flags.shell_completion:
        return
    register(schema)
    with initialize_config_dir(str(CONFIG_DIR), version_base=VERSION_BASE):
        if flags.config_dir and Path(flags.config_dir).is_dir():
            _add_config_dir(flags.config_dir)
        check = _Check(flags.config_name or config_name, schema, found, chosen)
        good = [check.alone(text, is_sweep(flags)) for text in flags.overrides]
        jobs = itertools.product(*(values for values in good if values))
        if not shows:
            for job in itertools.islice(jobs, MAX_JOBS):
                check.together(list(job), validate)
    if found:
        raise ConfigError(found)


def _add_config_dir(folder: str) -> None:
    """Let presets of the user's own folder be found, as Hydra will."""
    loader: Any = GlobalHydra.instance().config_loader()
    path = f"file://{Path(folder).resolve()}"
    anchor = SearchPathQuery(provider="schema")
    loader.config_search_path.prepend("command-line", path, anchor)
    loader.repository.initialize_sources(loader.config_search_path)


class _Check:
    """The mistakes found so far, and what is needed to find more."""

    def __init__(
        self,
        config_name: str,
        schema: type,
        found: list[Mistake],
        chosen: Sequence[str],
    ) -> None:
        self.config_name = config_name
        self.schema = schema
        self.chosen = chosen
        self.found = found
        self.loader: Any = GlobalHydra.instance().config_loader()
        self.parser = OverridesParser.create(config_loader=self.loader)
        self.rejected: set[str] = set()  # groups whose choice cannot be used
        self.files: dict[str, bool] = {}  # presets looked at: whether they are right
        self.choices: dict[str, Any] = {}  # of each group that this command knows
        self.tree = schema_node(schema)
        try:
            self.choices = self._defaults([]).overrides.known_choices
            self.tree = compose(config_name, [*chosen], return_hydra_config=True)
        except Exception as e:
            self.rejected.add(config_name)
            if not self._preset_mistakes([]):
                self._add(config_name, "", _why(e))

    def alone(self, text: str, sweep: bool) -> list[str]:
        """Check one argument by itself; give it, or each value of a sweep, if right."""
        key, _, value = text.lstrip("+~").partition("=")
        try:
            parsed = self.parser.parse_override(text)
            parsed.config_loader = self.loader
            if not parsed.is_sweep_override():
                return [text] if self._right(parsed) else []
            if not sweep:
                rule = (
                    f"is a sweep: add --multirun, or for a list write {key}=[{value}]"
                )
                self._add(key, value, rule)
                return []
            if not parsed.is_discrete_sweep():
                return []  # an interval: only the sweeper knows its values
            name = parsed.get_key_element()
            each = [f"{name}={item}" for item in parsed.sweep_string_iterator()]
            singles = [self.parser.parse_override(single) for single in each]
            return [
                single
                for single, parsed in zip(each, singles, strict=True)
                if self._right(parsed)
            ]
        except HydraException as e:
            if "=" not in text and text[:1] != "~":
                names = self._names()
                rule = "is not key=value"
                rule += "" if key in names else did_you_mean(key, names)
            else:
                rule = f"cannot be read: {_why(e)}\n"
                rule += f"quote what is special: '{key}=\"...\"'"
            self._add(key, value, rule)
            return []

    def together(self, overrides: list[str], validate: Validate) -> None:
        """Compose what is right by itself, and add the mistakes between keys."""
        sections = {f.name for f in fields(self.schema)}
        if not self.rejected <= sections:
            return  # what an unusable experiment would have set is unknown
        try:
            config = load(compose(self.config_name, overrides), self.schema)
        except ConfigError as e:
            mistakes = e.mistakes
        except Exception as e:
            mistakes = [Mistake("command line", "", _why(e))]
        else:
            mistakes = validate(config)
        # A rule about a key that is itself wrong would speak of its default.
        named = {word for mistake in self.found for word in _keys_in(mistake)}
        for mistake in mistakes:
            section = mistake.key.partition(".")[0]
            inside = any(key.startswith(f"{mistake.key}.") for key in named)
            if section in self.rejected or inside:
                continue
            if not _keys_in(mistake) & named:
                self._add(*mistake)

    def _right(self, override: Override) -> bool:
        """Record what is wrong with one override; say whether nothing is."""
        before, tree = len(self.found), self.tree
        key, value = override.key_or_group, override.value()
        options = self.loader.get_group_options(key)
        if options and not isinstance(value, dict):
            return self._group_right(override, options)
        if override.package is not None:
            self._add(key, value, f"takes no package; leave out @{override.package}")
        elif override.is_add() and has_key(tree, key):
            self._add(key, value, f"is there already; write {key}=... without the +")
        elif override.is_delete() and not (has_key(tree, key) and in_table(tree, key)):
            rule = "cannot be removed; leave it out, and it has its default"
            self._add(key, "", rule if has_key(tree, key) else unknown_key(tree, key))
        elif not override.is_delete():
            new = override.is_add() or override.is_force_add()
            self.found += value_mistakes(tree, key, value, open_tables=new)
        return len(self.found) == before

    def _group_right(self, override: Override, options: list[str]) -> bool:
        key, value, rule = override.key_or_group, override.value(), ""
        listed = ", ".join(options)
        if key not in self.choices:
            own = ", ".join(group for group in self.choices if "/" not in group)
            self._add(
                key, value, f"is no group of this command: {own or 'it has none'}"
            )
            return False
        if override.package is not None:
            rule = f"takes no package; leave out @{override.package}"
        elif override.is_delete():
            pass
        elif override.is_add() or override.is_force_add():
            rule = f"is one of this command's groups already; write {key}={value}"
        elif value is None:
            rule = f"must be one of {listed}; ~{key} is none"
        else:
            for choice in value if isinstance(value, list) else [value]:
                if str(choice) not in options:
                    close = did_you_mean(str(choice), options)
                    rule = f"must be one of {listed}{close}"
        if rule:
            self._add(key, value, rule)
        elif not self._preset_mistakes([str(override.input_line)]):
            return True
        self.rejected.add(key)
        return False

    def _preset_mistakes(self, overrides: list[str]) -> bool:
        """Check every YAML file that a choice draws in; say whether one is wrong."""
        wrong = False
        try:
            defaults = self._defaults(overrides).defaults
        except Exception as e:
            key, _, value = "".join(overrides).partition("=")
            rule = f"{_why(e)}\nin the file of {key}={value}, or one that it names"
            if key:
                self._add(key, value, rule)
            else:
                self._add(self.config_name, "", _why(e))
            return True
        for default in defaults:
            path = str(default.config_path)
            if path == "schema" or path.startswith("hydra/"):
                continue
            if path not in self.files:
                self.files[path] = self._preset_right(path, default.package)
            wrong |= not self.files[path]
        return wrong

    def _preset_right(self, path: str, package: str | None) -> bool:
        before = len(self.found)
        preset = self.loader.repository.load_config(path)
        where = f"{preset.path.removeprefix('file://')}/{path}.yaml"
        prefix = f"{package}." if package else ""
        tree = schema_node(self.schema)
        for name, value in OmegaConf.to_container(preset.config).items():  # type: ignore
            if prefix or name != "hydra":
                for mistake in value_mistakes(tree, f"{prefix}{name}", value, True):
                    self._add(*mistake[:2], f"{mistake.rule}\nin {where}")
        return len(self.found) == before

    def _defaults(self, overrides: list[str]) -> Any:
        given = {text.partition("=")[0] for text in overrides}
        chosen = [text for text in self.chosen if text.partition("=")[0] not in given]
        return self.loader.compute_defaults_list(
            self.config_name, [*chosen, *overrides], RunMode.RUN
        )

    def _names(self) -> list[str]:
        groups = [group for group in self.choices if "/" not in group]
        return [*groups, *dotted_keys(self.tree)]

    def _add(self, key: str, value: object, rule: str) -> None:
        mistake = Mistake(key, value, rule)
        if mistake not in self.found:
            self.found.append(mistake)


def _keys_in(mistake: Mistake) -> set[str]:
    """Give the dotted keys that a mistake speaks of."""
    return {mistake.key, *re.findall(r"[a-z_]+(?:\.[a-z0-9_]+)+", mistake.rule)}


def _why(error: BaseException) -> str:
    """Give Hydra's message without its search path, links and line breaks."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    text = re.split(r"Config search path|Search path:|See https", text)[0]
    return " ".join(text.split())
