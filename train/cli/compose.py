"""Turn a command line into one config, or into the list of all its mistakes.

Hydra alone stops at the first mistake, with exit code 1. Here its parser reads each
argument, its loader composes the chosen presets (`presets.py`), and the other overrides
are set in these. `schema.py` checks the result against the dataclasses, and `rules.py`
checks the rules between keys.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.cli.compat import node_of, override_parser
from train.cli.flags import flag_mistakes, is_sweep, parse_flags
from train.cli.hints import (
    did_you_mean,
    keys_of,
    must_be,
    similar_names,
    type_in_words,
    type_of,
    unknown_key,
)
from train.cli.presets import Presets, read_once, search_path, why
from train.cli.quoting import quote_text
from train.cli.schema import convert
from train.config import Config
from train.errors import ConfigError, Mistake
from train.masking import remember_secrets
from train.mesh_sizes import mesh_mistakes

MAX_JOBS = 32  # checked before a sweep begins; each job also checks itself

Validate = Callable[[Any], list[Mistake]]


def compose(
    overrides: Sequence[str], config_name: str = "train", schema: type = Config
) -> Any:
    """Return the config of a command line, without checking rules between keys.

    Raises:
        ConfigError: with every mistake.
    """
    return check_command_line(quote_text(overrides, schema), config_name, schema)


def no_rules(config: Any) -> list[Mistake]:
    """Check no rules between keys."""
    return []


def check_command_line(
    argv: Sequence[str],
    config_name: str = "train",
    schema: type = Config,
    validate: Validate = no_rules,
    chosen: Sequence[str] = (),
) -> Any:
    """Check the arguments of a command (`sys.argv[1:]`), and each value of a sweep.

    `--cfg` and other flags that only show the config do not check rules between keys.

    Args:
        argv: the arguments, as `quote_text` returns them.
        config_name: the root file in `configs/`.
        schema: the dataclass of all keys.
        validate: lists the mistakes between keys.
        chosen: the choices of groups that this schema is for.

    Returns:
        The config, or that of the first job of a sweep; None for help.

    Raises:
        ConfigError: with every mistake, first in the order of the arguments, then in
            the order of the config.
    """
    flags = parse_flags(argv)
    mistakes = flag_mistakes(flags)
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
        mistakes.sort(key=lambda mistake: _place(mistake.key, typed, sections))
        raise ConfigError(mistakes)
    return configs[0]


class _Check:
    """Collects the mistakes of a command line."""

    def __init__(
        self,
        presets: Presets,
        schema: type,
        validate: Validate,
        mistakes: list[Mistake],
    ) -> None:
        self.presets, self.schema, self.validate = presets, schema, validate
        self.mistakes = mistakes
        # The groups whose choice is wrong.
        self.rejected = {m.key for m in mistakes} & presets.choices.keys()
        self.parser = override_parser(presets.loader)

    def read(self, text: str, sweep: bool) -> list[Override]:
        """Parse an argument into one override, or one for each value of a sweep."""
        key, _, value = text.lstrip("+~").partition("=")
        try:
            parsed = self.parser.parse_override(text)
            parsed.config_loader = self.presets.loader
            overrides = [parsed]
            if parsed.is_sweep_override():
                # The values of an interval are only known to the sweeper.
                items = parsed.is_discrete_sweep() and parsed.sweep_string_iterator()
                name = parsed.get_key_element()
                texts = [f"{name}={item}" for item in items or ()]
                overrides = [self.parser.parse_override(single) for single in texts]
                if not sweep:
                    rule = "is a sweep: add --multirun, or for a list write "
                    return self._add(key, value, f"{rule}{key}=[{value}]")
        except HydraException as error:
            if "=" in text or text[:1] == "~":
                rule = f"cannot be read: {why(error)}\n"
                rule += f"quote what is special: '{key}=\"...\"'"
            else:
                names = [*self.presets.groups, *keys_of(self.schema)]
                rule = "is not key=value"
                rule += "" if key in names else did_you_mean(similar_names(key, names))
            return self._add(key, value, rule)
        return [override for override in overrides if self._fits(override)]

    def job(self, overrides: Sequence[Override]) -> Any:
        """Return the config of one job, with defaults for wrong values."""
        chosen = [str(o.input_line) for o in overrides if self._options(o)]
        tree, mistakes = self.presets.compose(chosen)
        for mistake in mistakes:
            self.rejected.add(mistake.key)
            self._record(mistake)
        typed = []
        for override in overrides:
            if not self._options(override):
                if mistake := _set(tree, override, self.schema):
                    self._record(mistake)
                else:
                    typed.append(override.key_or_group)
        tree.pop("hydra", None)
        remember_secrets(str(OmegaConf.to_container(tree)))
        try:
            values: Any = OmegaConf.to_container(tree, resolve=True)
        except OmegaConfBaseException as error:
            self._add(str(error.full_key or "command line"), "", why(error))
            return None
        config, mistakes = convert(values, self.schema)
        for mistake in mistakes:
            is_typed = any(mistake.key.startswith(key) for key in typed)
            file = None if is_typed else self.presets.file_with(mistake.key, chosen)
            if file:
                mistake = mistake._replace(rule=f"{mistake.rule}\nin {file}")
            self._record(mistake)
        if self.rejected <= {f.name for f in fields(self.schema)}:
            # A wrong experiment might have set any key.
            self._between(self.validate(config), typed)
            if self.mistakes and isinstance(config, Config):
                # Without other mistakes these are found once devices are counted.
                self._between(mesh_mistakes(config), typed)
        return config

    def _between(self, mistakes: list[Mistake], typed: Sequence[str]) -> None:
        """Record mistakes between keys, except those that follow from other mistakes.

        A mistake follows from another one if its rule reads a key that is wrong, or
        that a user may have meant by a wrong key: it then has its default here.
        """
        wrong_keys = {m.key for m in self.mistakes}
        wrong_keys |= {key for m in self.mistakes for key in m.related}
        for mistake in mistakes:
            key = mistake.key
            section, table = key.partition(".")[0], key.rpartition(".")[0]
            is_entry = key in typed and type_of(self.schema, table)[1]
            is_unknown = section in self.rejected and not is_entry
            is_section_of_wrong = any(k.startswith(f"{key}.") for k in wrong_keys)
            follows = wrong_keys & {key, *mistake.related}
            if not (is_unknown or is_section_of_wrong or follows):
                self._record(mistake)

    def _options(self, override: Override) -> list[str]:
        """List the choices of a group; empty for a key."""
        section = isinstance(override.value(), dict)
        return [] if section else self.presets.options(override.key_or_group)

    def _fits(self, override: Override) -> bool:
        """Return whether an override is possible at all, and record why not."""
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

    def _add(self, key: str, value: object, rule: str) -> list[Override]:
        """Record a mistake; no override remains of the argument."""
        self._record(Mistake(key, value, rule))
        return []

    def _record(self, mistake: Mistake) -> None:
        if mistake not in self.mistakes:
            self.mistakes.append(mistake)


def _choice_rule(override: Override, options: list[str]) -> str:
    """Return the rule that a choice breaks; empty if there is none."""
    key, value = override.key_or_group, override.value()
    rule = f"must be one of {', '.join(options)}"
    if override.is_add() or override.is_force_add():
        return f"is one of this command's groups already; write {key}={value}"
    if value is None:
        return f"{rule}; ~{key} chooses none"
    choices = map(str, value if isinstance(value, list) else [value])
    if isinstance(value, list) and "none" in value and value[1:]:
        return "none stands alone; leave it out, or the others"
    unknown = next((choice for choice in choices if choice not in options), None)
    if unknown is None:
        return ""
    return rule + did_you_mean(similar_names(unknown, options))


def _set(tree: DictConfig, override: Override, schema: type) -> Mistake | None:
    """Set or remove one key in the composed values; return why that is impossible."""
    key, value = override.key_or_group, override.value()
    parent, _, name = key.rpartition(".")
    section, node = node_of(tree, parent), node_of(tree, key)
    in_table = type_of(schema, parent)[1] and isinstance(section, DictConfig)
    if override.is_delete():
        if not in_table:
            rule = "cannot be removed; leave it out, and it has its default"
            return unknown_key(schema, key) if node is None else Mistake(key, "", rule)
        if node is None:
            rule = f"there is no such key; {parent} has {', '.join(section)}"
            return Mistake(key, "", rule)
        section.pop(name)
        return None
    if override.is_add() and node is not None:
        return Mistake(key, value, f"is there already; write {key}=... without the +")
    is_hydras = node is None and key.startswith("hydra.")
    if is_hydras or not isinstance(section, DictConfig | None):
        return unknown_key(schema, key, value)
    required = {DictConfig: dict, ListConfig: list}.get(type(node), object)
    # An entry of a table may be a list or a name, and null may replace a list.
    if required is list and (in_table or value is None):
        required = object
    if not isinstance(value, required):
        words = type_in_words(type_of(schema, key)[0])
        return Mistake(key, value, must_be(words, schema, key))
    try:
        OmegaConf.update(tree, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        return Mistake(key, value, str(error).splitlines()[0])
    return None


def _place(key: str, typed: Sequence[str], sections: Sequence[str]) -> tuple[int, int]:
    """Return the place of a mistake in the list: flags, arguments, then all others."""
    if key.startswith("-"):
        return -1, 0
    exact = [i for i, text in enumerate(typed) if text and key.startswith(text)]
    parts = [i for i, text in enumerate(typed) if text.startswith(f"{key}.")]
    section = key.partition(".")[0]
    order = sections.index(section) if section in sections else -1
    return min(exact or parts or [len(typed)]), order
