"""The section `model`: the config of a GPT, with the keys that records of mixers add.

`ModelConfig` knows no mixer of the catalog. In the section, the values of `mixer` and
`mixer_pattern` are the names in the catalog, and a mixer whose record states a section
has its keys below `model.parts.<name>`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from model.config import ModelConfig, Section
from model.mixer_catalog import MIXERS
from model.mixer_kind import MixerKind


@dataclass(frozen=True)
class _WithParts(ModelConfig):
    """A model's config that may have sections of parts, in its attribute `parts`."""

    def part(self, section: type[Section]) -> Section:
        """Return the values of a part's own keys, given the dataclass that has them."""
        parts = getattr(self, "parts", None)
        values = vars(parts).values() if parts else ()
        return next(
            (value for value in values if isinstance(value, section)), section()
        )


def model_section(mixers: Mapping[str, MixerKind]) -> type[ModelConfig]:
    """Return the dataclass of the section `model`, given the records of all mixers."""
    Mixer: Any = StrEnum("Mixer", [*mixers])
    hints = get_type_hints(ModelConfig, include_extras=True)
    names = Annotated[Mixer, *hints["mixer"].__metadata__]
    patterns = Annotated[tuple[Mixer, ...] | None, *hints["mixer_pattern"].__metadata__]
    keys: list[Any] = [
        ("mixer", names, Mixer(ModelConfig.mixer)),
        ("mixer_pattern", patterns, ModelConfig.mixer_pattern),
    ]
    sections = {name: kind.section for name, kind in mixers.items() if kind.section}
    if sections:
        fields = [(n, s, field(default_factory=s)) for n, s in sections.items()]
        documented = {"__doc__": "The keys of mixers that have keys of their own."}
        parts = make_dataclass("Parts", fields, frozen=True, namespace=documented)
        keys.append(("parts", parts, field(default_factory=parts)))
    # Without a docstring, `dataclass` would write one with the type of every key.
    documented = {"__doc__": ModelConfig.__doc__}
    return make_dataclass(
        "ModelSection", keys, bases=(_WithParts,), frozen=True, namespace=documented
    )


if TYPE_CHECKING:
    ModelSection = ModelConfig
else:
    ModelSection = model_section(MIXERS)
