"""From a command line to one config, or to everything that is wrong with it.

By itself Hydra stops at the first mistake, with exit code 1. Here its parser reads each
argument, its loader composes the presets that the groups choose (`presets.py`), and
the other overrides are set in those. `schema.py` holds the result against the
dataclasses, `rules.py` adds the rules between keys.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train import mesh_sizes
from train.cli.flags import flag_mistakes, is_sweep, parse_flags, without_spaced
from train.cli.hints import did_you_mean, keys_of, type_of, unknown_key, value_rule
from train.cli.presets import Presets, node_of, read_once, search_path, why
from train.cli.quoting import quote_text
from train.cli.schema import convert
from train.config import Config
from train.errors import ConfigError, Mistake
from train.masking import remember

MAX_JOBS = 32  # of a sweep checked as a whole beforehand; each job checks itself again

Validate = Callable[[Any], list[Mistake]]


def compose(
    overrides: Sequence[str], config_name: str = "train", schema: type = Config
) -> Any:
    """Return the config that a command line means, the rules between keys unchecked.

    Raises:
        ConfigError: with every mistake in it.
    """
    return check_command_line(quote_text(overrides, schema), config_name, schema)


def no_rules(config: Any) -> list[Mistake]:
    """List no mistakes: all is well between keys."""
    return []


def check_command_line(
    argv: Sequence[str],
    config_name: str = "train",
    schema: type = Config,
    validate: Validate = no_rules,
    chosen: Sequence[str] = (),
) -> Any:
    """Check the arguments of a command (`sys.argv[1:]`), of a sweep each value.

    With `--cfg` and the like, which only show the config, the rules between keys are
    left out.

    Args:
        argv: the arguments, as `quote_text` has them.
        config_name: root file in `configs/`.
        schema: the dataclass of all keys.
        validate: lists the mistakes between them.
        chosen: choices of groups that the schema holds for.

    Returns:
        The config; of a sweep the first job's; None if only help is asked for.

    Raises:
        ConfigError: with every mistake there is, in the order of the arguments, then
            of the config.
    """
    argv, mistakes = without_spaced(argv)
    flags = parse_flags(argv)
    mistakes += flag_mistakes(flags)
    helps = flags.help or flags.hydra_help or flags.info
    if flags.shell_completion or (helps and not flags.overrides and not mistakes):
        return None
    shows = helps or flags.cfg
    with search_path(schema, flags.config_dir):
        read = Presets if flags.config_dir else read_once
        presets = read(flags.config_name or config_name, schema, tuple(chosen))
        check = _Check(presets, schema, no_rules if shows else validate, mistakes)
        parts = [check.read(text, is_sweep(flags)) for text in flags.overrides]
        jobs = itertools.product(*(part for part in parts if part))
        configs = [check.job(job) for job in itertools.islice(jobs, MAX_JOBS)]
    if mistakes:
        typed = [text.lstrip("+~").partition("=")[0] for text in flags.overrides]
        sections = [field.name for field in fields(schema)]
        raise ConfigError(
            sorted(mistakes, key=lambda m: _place(m.key, typed, sections))
        )
    return configs[0]


class _Check:
    """The mistakes so far, and what is needed to find more."""

    def __init__(
        self,
        presets: Presets,
        schema: type,
        validate: Validate,
        mistakes: list[Mistake],
    ) -> None:
        self.presets, self.schema, self.validate = presets, schema, validate
        self.mistakes = mistakes
        # Groups whose choice cannot be used.
        self.rejected = {m.key for m in mistakes} & presets.choices.keys()
        self.parser = OverridesParser.create(config_loader=presets.loader)

    def read(self, text: str, sweep: bool) -> list[Override]:
        """Parse one argument: into one override, or one for each value of a sweep."""
        key, _, value = text.lstrip("+~").partition("=")
        try:
            parsed = self.parser.parse_override(text)
            parsed.config_loader = self.presets.loader
            overrides = [parsed]
            if parsed.is_sweep_override():
                # Only the sweeper knows the values of an interval.
                items = parsed.is_discrete_sweep() and parsed.sweep_string_iterator()
                name = parsed.get_key_element()
                texts = [f"{name}={item}" for item in items or ()]
                overrides = [self.parser.parse_override(single) for single in texts]
                if not sweep:
                    rule = "is a sweep: add --multirun, or for a list write "
                    self._add(key, value, f"{rule}{key}=[{value}]")
                    return []
        except HydraException as error:
            if "=" in text or text[:1] == "~":
                rule = f"cannot be read: {why(error)}\n"
                rule += f"quote what is special: '{key}=\"...\"'"
            else:
                names = [*self.presets.groups, *keys_of(self.schema)]
                rule = "is not key=value"
                rule += "" if key in names else did_you_mean(key, names)
            self._add(key, value, rule)
            return []
        return [override for override in overrides if self._fits(override)]

    def job(self, overrides: Sequence[Override]) -> Any:
        """Return the config of one job, wrong values replaced; record its mistakes."""
        chosen = [str(o.input_line) for o in overrides if self._options(o)]
        tree, mistakes = self.presets.compose(chosen)
        for mistake in mistakes:
            self.rejected.add(mistake.key)
            self._add(*mistake)
        typed = []
        for override in overrides:
            if not self._options(override):
                key, value = override.key_or_group, override.value()
                if rule := _set(tree, override, self.schema):
                    self._add(key, "" if override.is_delete() else value, rule)
                else:
                    typed.append(key)
        tree.pop("hydra", None)
        remember(str(OmegaConf.to_container(tree)))
        try:
            values: Any = OmegaConf.to_container(tree, resolve=True)
        except OmegaConfBaseException as error:
            self._add(str(error.full_key or "command line"), "", why(error))
            return None
        config, mistakes = convert(values, self.schema)
        for key, value, rule in mistakes:
            by_hand = any(key.startswith(prefix) for prefix in typed)
            file = None if by_hand else self.presets.file_with(key, chosen)
            self._add(key, value, f"{rule}\nin {file}" if file else rule)
        if self.rejected <= {f.name for f in fields(self.schema)}:
            # What else an unusable experiment would have set is unknown.
            self._between(self.validate(config), typed)
            if self.mistakes and isinstance(config, Config):
                # Alone they are found with all else that does not fit the devices.
                self._between(mesh_sizes.mistakes(config), typed)
        return config

    def _between(self, mistakes: list[Mistake], typed: Sequence[str]) -> None:
        """Add mistakes between keys, but none that speaks of a mistaken key's value."""
        faulty_keys = {word for mistake in self.mistakes for word in _keys_in(mistake)}
        for key, value, rule in mistakes:
            section, table = key.partition(".")[0], key.rpartition(".")[0]
            entry = key in typed and type_of(self.schema, table)[1]
            unknown = section in self.rejected and not entry
            inside = any(f"{faulty}.".startswith(f"{key}.") for faulty in faulty_keys)
            concerned = any(f"{faulty}=" in rule for faulty in faulty_keys)
            if not (unknown or inside or concerned):
                self._add(key, value, rule)

    def _options(self, override: Override) -> list[str]:
        """List a group's choices; empty for a key."""
        section = isinstance(override.value(), dict)
        return [] if section else self.presets.options(override.key_or_group)

    def _fits(self, override: Override) -> bool:
        """Record what is wrong with an override whatever else is set."""
        key, options, rule = override.key_or_group, self._options(override), ""
        if options and key not in self.presets.choices:
            groups = ", ".join(self.presets.groups) or "it has none"
            rule = f"is no group of this command: {groups}"
        elif override.package is not None:
            rule = f"takes no package; leave out @{override.package}"
        elif options and not override.is_delete():
            rule = _choice_rule(override, options)
        if rule:
            self._add(key, override.value(), rule)
            self.rejected |= {key} & self.presets.choices.keys()
        return not rule

    def _add(self, key: str, value: object, rule: str) -> None:
        mistake = Mistake(key, value, rule)
        if mistake not in self.mistakes:
            self.mistakes.append(mistake)


def _choice_rule(override: Override, options: list[str]) -> str:
    """Return what is wrong with a choice; empty if nothing is."""
    key, value = override.key_or_group, override.value()
    rule = f"must be one of {', '.join(options)}"
    if override.is_add() or override.is_force_add():
        return f"is one of this command's groups already; write {key}={value}"
    if value is None:
        return f"{rule}; ~{key} is none"
    choices = map(str, value if isinstance(value, list) else [value])
    if isinstance(value, list) and "none" in value and value[1:]:
        return "none stands alone; leave it out, or the others"
    unknown = next((choice for choice in choices if choice not in options), None)
    return "" if unknown is None else rule + did_you_mean(unknown, options)


def _set(tree: DictConfig, override: Override, schema: type) -> str:
    """Set one key in the composed values; return why that cannot be, empty if it is."""
    key, value = override.key_or_group, override.value()
    parent, _, name = key.rpartition(".")
    section, node = node_of(tree, parent), node_of(tree, key)
    in_table = type_of(schema, parent)[1] and isinstance(section, DictConfig)
    if override.is_delete():
        if node is None and in_table:
            return f"there is no such key; {parent} has {', '.join(section)}"
        if node is None:
            return unknown_key(schema, key)
        if not in_table:
            return "cannot be removed; leave it out, and it has its default"
        section.pop(name)
        return ""
    if override.is_add() and node is not None:
        return f"is there already; write {key}=... without the +"
    hydras = node is None and key.startswith("hydra.")
    if hydras or not isinstance(section, DictConfig | None):
        return unknown_key(schema, key)
    kind = {DictConfig: dict, ListConfig: list}.get(type(node), object)
    # What is a list in one table may be a name in another; null may stand for a list.
    kind = object if kind is list and (in_table or value is None) else kind
    if not isinstance(value, kind):
        return value_rule(schema, key, type_of(schema, key)[0])
    try:
        OmegaConf.update(tree, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        return str(error).splitlines()[0]
    return ""


def _place(key: str, typed: Sequence[str], sections: Sequence[str]) -> tuple[int, int]:
    """Return a mistake's place: flags, arguments, and what follows from several."""
    if key.startswith("-"):
        return -1, 0
    positions = [i for i, text in enumerate(typed) if text and key.startswith(text)]
    parts = [i for i, text in enumerate(typed) if text.startswith(f"{key}.")]
    section = key.partition(".")[0]
    order = sections.index(section) if section in sections else -1
    return min(positions or parts or [len(typed)]), order


def _keys_in(mistake: Mistake) -> set[str]:
    """List the dotted keys that a mistake speaks of."""
    return {mistake.key, *re.findall(r"[a-z_]+(?:\.[a-z0-9_]+)+", mistake.rule)}
