"""Turn a command line into one config, or into the list of all its mistakes.

Hydra alone stops at the first mistake, with exit code 1. Here Hydra only parses each
argument and composes the chosen presets (`presets.py`); the overrides of keys are
applied afterwards. `schema.py` checks the result against the dataclasses, and
`rules.py` checks the rules between keys.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import Mistake
from train.cli.compat import node_of, override_parser
from train.cli.flags import flag_mistakes, is_sweep, key_of, parse_flags
from train.cli.hints import (
    did_you_mean,
    keys_of,
    must_be,
    similar_names,
    type_in_words,
    type_of,
    unknown_key,
)
from train.cli.other_trainers import translate
from train.cli.presets import Presets, cached_presets, hydra_message, search_path
from train.cli.quoting import quote_text
from train.cli.schema import convert
from train.config import Config
from train.errors import ConfigError
from train.masking import (
    holds_secret,
    is_secret_name,
    remember_config,
    remember_secrets,
)
from train.resolve.mesh_sizes import mesh_mistakes

MAX_JOBS = 32  # jobs of a sweep to check before it starts; each job also checks itself

# Hydra needs quotes around the character, so `quote_text` has added them.
_ELLIPSES = {"...", "\N{HORIZONTAL ELLIPSIS}", '"\N{HORIZONTAL ELLIPSIS}"'}
_ELLIPSIS_RULE = (
    "stands for what a page leaves out; write your own arguments instead, or leave it "
    "out. If three dots are meant, write key='\"...\"'"
)

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
    """Return no mistakes: the default `validate`, without rules between keys."""
    return []


def check_command_line(
    argv: Sequence[str],
    config_name: str = "train",
    schema: type = Config,
    validate: Validate = no_rules,
    default_choices: Sequence[str] = (),
) -> Any:
    """Check the arguments of a command and the jobs of a sweep; return the config.

    Rules between keys are not checked with `--cfg` and the flags that print help.

    Args:
        argv: the arguments (`sys.argv[1:]`), as returned by `quote_text`.
        config_name: the root file in `configs/`.
        schema: the dataclass of all keys.
        validate: lists the broken rules between keys.
        default_choices: `group=choice` pairs that the arguments may override.

    Returns:
        The config (in a sweep, of the first job); None if only help is shown.

    Raises:
        ConfigError: with every mistake, in the order of the arguments and then of the
            config's sections.
    """
    flags = parse_flags(argv)
    mistakes = flag_mistakes(flags)
    shows_help = flags.help or flags.hydra_help or flags.info
    if flags.shell_completion or (shows_help and not flags.overrides and not mistakes):
        return None
    only_prints = shows_help or flags.cfg
    with search_path(schema, flags.config_dir):
        load = Presets if flags.config_dir else cached_presets
        root = flags.config_name or config_name
        presets = load(root, schema, tuple(default_choices))
        rules = no_rules if only_prints else validate
        checker = _CommandLineChecker(presets, schema, rules, mistakes)
        alternatives = [checker.parse(t, is_sweep(flags)) for t in flags.overrides]
        jobs = itertools.product(*filter(None, alternatives))
        configs = [checker.job_config(job) for job in itertools.islice(jobs, MAX_JOBS)]
    if mistakes:
        typed_keys = [key_of(text) for text in flags.overrides]
        sections = [field.name for field in fields(schema)]
        mistakes.sort(key=lambda mistake: _sort_key(mistake.key, typed_keys, sections))
        raise ConfigError(mistakes)
    return configs[0]


class _CommandLineChecker:
    """Composes the configs of a command line and collects the mistakes."""

    def __init__(
        self,
        presets: Presets,
        schema: type,
        validate: Validate,
        mistakes: list[Mistake],
    ) -> None:
        self.presets = presets
        self.schema = schema
        self.validate = validate
        self.mistakes = mistakes
        self.rejected_groups = {m.key for m in mistakes} & presets.choices.keys()
        self.parser = override_parser(presets.loader)

    def parse(self, text: str, is_multirun: bool) -> list[Override]:
        """Parse an argument; return one override, or one for each value of a sweep."""
        key, _, value = text.lstrip("+~").partition("=")
        if _ELLIPSES & {text, value}:
            return self._reject(key, value.strip('"'), _ELLIPSIS_RULE)
        try:
            parsed = self.parser.parse_override(text)
            parsed.config_loader = self.presets.loader
            overrides = [parsed]
            if parsed.is_sweep_override():
                # Intervals are not checked: only Hydra's sweeper knows their values.
                items = parsed.is_discrete_sweep() and parsed.sweep_string_iterator()
                name = parsed.get_key_element()
                texts = [f"{name}={item}" for item in items or ()]
                overrides = [self.parser.parse_override(single) for single in texts]
                if not is_multirun:
                    rule = "is a sweep: add --multirun, or for a list write "
                    return self._reject(key, value, f"{rule}{key}=[{value}]")
        except HydraException as error:
            if "=" in text or text[:1] == "~":
                message = hydra_message(error)
                if is_secret_name(key.rpartition(".")[2]) or holds_secret(text):
                    message = "Its value is not shown, because it holds a secret."
                rule = f"cannot be read: {message}\n"
                rule += f"quote special characters: '{key}=\"...\"'"
            else:
                names = [*self.presets.groups, *keys_of(self.schema)]
                rule = "is not key=value"
                rule += "" if key in names else did_you_mean(similar_names(key, names))
            return self._reject(key, value, rule)
        return [override for override in overrides if self._is_possible(override)]

    def job_config(self, overrides: Sequence[Override]) -> Any:
        """Return the config of one job, with defaults in place of wrong values."""
        choices = [str(o.input_line) for o in overrides if self._group_choices(o)]
        tree, mistakes = self.presets.compose(choices)
        for mistake in mistakes:
            self.rejected_groups.add(mistake.key)
            self._record(mistake)
        typed_keys = []
        for override in overrides:
            if not self._group_choices(override):
                if mistake := _apply(tree, override, self.schema):
                    self._record(mistake)
                else:
                    typed_keys.append(override.key_or_group)
        tree.pop("hydra", None)
        remember_secrets(str(OmegaConf.to_container(tree)))
        try:
            values: Any = OmegaConf.to_container(tree, resolve=True)
        except OmegaConfBaseException as error:
            key = str(error.full_key or "command line")
            self._reject(key, "", hydra_message(error))
            return None
        remember_config(values)
        config, mistakes = convert(values, self.schema, translate)
        for mistake in mistakes:
            is_typed = any(mistake.key.startswith(key) for key in typed_keys)
            file = None if is_typed else self.presets.source_file(mistake.key, choices)
            if file:
                mistake = mistake._replace(rule=f"{mistake.rule}\nin {file}")
            self._record(mistake)
        if self.rejected_groups <= {f.name for f in fields(self.schema)}:
            # Not checked after a rejected experiment preset, which might set any key.
            self._record_broken_rules(self.validate(config), typed_keys)
            if self.mistakes and isinstance(config, Config):
                # A valid config gets this check after its devices have been counted.
                self._record_broken_rules(mesh_mistakes(config), typed_keys)
        return config

    def _record_broken_rules(
        self, mistakes: list[Mistake], typed_keys: Sequence[str]
    ) -> None:
        """Record mistakes between keys, unless they follow from other mistakes.

        A mistake follows from another if its rule reads a key that has a default value
        only because the user mistyped the key's name or value.
        """
        wrong_keys = {m.key for m in self.mistakes}
        wrong_keys |= {key for m in self.mistakes for key in m.related}
        for mistake in mistakes:
            key = mistake.key
            section = key.partition(".")[0]
            table = key.rpartition(".")[0]
            is_entry = key in typed_keys and type_of(self.schema, table)[1]
            in_rejected_group = section in self.rejected_groups and not is_entry
            holds_wrong_key = any(k.startswith(f"{key}.") for k in wrong_keys)
            reads_wrong_key = wrong_keys & {key, *mistake.related}
            if not (in_rejected_group or holds_wrong_key or reads_wrong_key):
                self._record(mistake)

    def _group_choices(self, override: Override) -> list[str]:
        """Return the possible choices if an override sets a group, otherwise []."""
        is_section = isinstance(override.value(), dict)
        return [] if is_section else self.presets.options(override.key_or_group)

    def _is_possible(self, override: Override) -> bool:
        """Return whether an override is possible, and record the mistake if not."""
        key = override.key_or_group
        options = self._group_choices(override)
        rule = ""
        if options and key not in self.presets.choices:
            groups = ", ".join(self.presets.groups) or "it has none"
            rule = f"is not a group of this command: {groups}"
        elif override.package is not None:
            rule = f"takes no package; leave out @{override.package}"
        elif options and not override.is_delete():
            rule = _choice_rule(override, options)
        if rule:
            self._reject(key, override.value(), rule)
            self.rejected_groups |= {key} & self.presets.choices.keys()
        return not rule

    def _reject(self, key: str, value: object, rule: str) -> list[Override]:
        """Record a mistake in an argument; return an empty list of overrides."""
        self._record(Mistake(key, value, rule))
        return []

    def _record(self, mistake: Mistake) -> None:
        if mistake not in self.mistakes:
            self.mistakes.append(mistake)


def _choice_rule(override: Override, options: list[str]) -> str:
    """Return the rule that a choice breaks, or an empty string."""
    key = override.key_or_group
    value = override.value()
    rule = f"must be one of {', '.join(options)}"
    if override.is_add() or override.is_force_add():
        return f"is one of this command's groups already; write {key}={value}"
    if value is None:
        return f"{rule}; ~{key} chooses none"
    choices = map(str, value if isinstance(value, list) else [value])
    if isinstance(value, list) and "none" in value and value[1:]:
        return "none stands alone; leave out none, or the other choices"
    unknown = next((choice for choice in choices if choice not in options), None)
    if unknown is None:
        return ""
    return rule + did_you_mean(similar_names(unknown, options))


def _apply(tree: DictConfig, override: Override, schema: type) -> Mistake | None:
    """Set or remove one key in the composed values; return the mistake or None."""
    key = override.key_or_group
    value = override.value()
    parent, _, name = key.rpartition(".")
    section = node_of(tree, parent)
    node = node_of(tree, key)
    in_table = type_of(schema, parent)[1] and isinstance(section, DictConfig)
    if override.is_delete():
        if not in_table:
            rule = "cannot be removed; leave it out to use its default"
            if node is None:
                return unknown_key(schema, key, translate=translate)
            return Mistake(key, "", rule)
        if node is None:
            rule = f"there is no such key; {parent} has {', '.join(section)}"
            return Mistake(key, "", rule)
        section.pop(name)
        return None
    if override.is_add() and node is not None:
        return Mistake(key, value, f"exists already; write {key}=... without the +")
    is_hydra_key = node is None and key.startswith("hydra.")
    if is_hydra_key or not isinstance(section, DictConfig | None):
        return unknown_key(schema, key, value, translate)
    required_type = {DictConfig: dict, ListConfig: list}.get(type(node), object)
    # A list in a table may be replaced by a name, and any list may be null.
    if required_type is list and (in_table or value is None):
        required_type = object
    if not isinstance(value, required_type):
        words = type_in_words(type_of(schema, key)[0])
        return Mistake(key, value, must_be(words, schema, key))
    try:
        OmegaConf.update(tree, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        return Mistake(key, value, str(error).splitlines()[0])
    return None


def _sort_key(
    key: str, typed_keys: Sequence[str], sections: Sequence[str]
) -> tuple[int, int]:
    """Return the sort key of a mistake: flags, then typed arguments, then the rest."""
    if key.startswith("-"):
        return -1, 0
    enclosing = [i for i, t in enumerate(typed_keys) if t and key.startswith(t)]
    inner = [i for i, t in enumerate(typed_keys) if t.startswith(f"{key}.")]
    section = key.partition(".")[0]
    section_index = sections.index(section) if section in sections else -1
    return min(enclosing or inner or [len(typed_keys)]), section_index
