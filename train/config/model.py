"""The section `model`: the config of a GPT, with the keys that records of mixers add.

`ModelConfig` knows no mixer of the catalog. In the section, the values of `mixer` and
`mixer_pattern` are the names in the catalog, and a mixer whose record states a section
has its keys below `model.parts.<name>`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, make_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from model.config import ModelConfig, Section
from model.mixer_catalog import MIXERS
from model.mixer_kind import MixerKind
from model.mlp_kind import MLPKind
from train.own_parts import with_own


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


def model_section(
    mixers: Mapping[str, MixerKind], mlps: Iterable[MLPKind] = ()
) -> type[ModelConfig]:
    """Return the dataclass of the section `model`.

    `mixers` are the records of all mixers, and `mlps` those of added MLPs.
    """
    Mixer: Any = StrEnum("Mixer", [*mixers])
    hints = get_type_hints(ModelConfig, include_extras=True)
    names = Annotated[Mixer, *hints["mixer"].__metadata__]
    patterns = Annotated[tuple[Mixer, ...] | None, *hints["mixer_pattern"].__metadata__]
    keys: list[Any] = [
        ("mixer", names, Mixer(ModelConfig.mixer)),
        ("mixer_pattern", patterns, ModelConfig.mixer_pattern),
    ]
    attributes = {"__doc__": ModelConfig.__doc__, "kinds": mixers}
    section = make_dataclass(
        "ModelSection", keys, bases=(_WithParts,), frozen=True, namespace=attributes
    )
    return with_own(section, "mlp", mlps, mixers.values())


if TYPE_CHECKING:
    ModelSection = ModelConfig
else:
    ModelSection = model_section(MIXERS)
