"""The catalog: the parts that a user adds, and the dataclasses of keys with them."""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self, get_type_hints

from typing_extensions import Doc

from data.config import DataConfig
from data.errors import Mistake
from data.text.files import Format
from longhaul.kinds import LossKind, Metric, OptimizerKind, ScheduleKind
from model.mixer_catalog import MIXERS
from model.mixer_kind import MixerKind
from model.mlp_kind import MLPKind
from train.config import Config, OptimizerConfig, ScheduleConfig, TrainConfig
from train.config.model import ModelSection, model_section
from train.own_parts import names_in, with_own, with_sections

_NAME = re.compile(r"[a-z][a-z0-9_]*")
# The names that a line of metrics.jsonl has already.
_METRICS = {"loss", "loss_mean", "targets", "grad_norm", "learning_rate", "skipped"}
_METRICS |= {"overflow", "ahead_loss", "expert_load", "max_score", "tokens", "mfu"}
_METRICS |= {"positions", "memory_bytes", "flops", "tokens_per_second", "step_seconds"}
_METRICS |= {"step"}


@dataclass(frozen=True)
class _TrainConfig(TrainConfig):
    """The section `train` of a program to which losses were added."""

    loss: Annotated[
        Literal["cross_entropy"],
        Doc("The loss of a token, whose mean over the batch a step minimizes."),
    ] = "cross_entropy"


@dataclass(frozen=True)
class Catalog:
    """The parts that a user adds to the built-in ones.

    Each `with_` method returns a catalog with one more part. The parts are checked when
    a command runs.
    """

    mixers: tuple[MixerKind, ...] = ()
    mlps: tuple[MLPKind, ...] = ()
    losses: tuple[LossKind, ...] = ()
    optimizers: tuple[OptimizerKind, ...] = ()
    schedules: tuple[ScheduleKind, ...] = ()
    metrics: tuple[Metric, ...] = ()
    formats: tuple[Format, ...] = ()

    def with_mixer(self, kind: MixerKind) -> Self:
        """Return a catalog with another value of `model.mixer`."""
        return replace(self, mixers=(*self.mixers, kind))

    def with_mlp(self, kind: MLPKind) -> Self:
        """Return a catalog with another value of `model.mlp`."""
        return replace(self, mlps=(*self.mlps, kind))

    def with_loss(self, kind: LossKind) -> Self:
        """Return a catalog with another value of `train.loss`."""
        return replace(self, losses=(*self.losses, kind))

    def with_optimizer(self, kind: OptimizerKind) -> Self:
        """Return a catalog with another value of `optimizer.name`."""
        return replace(self, optimizers=(*self.optimizers, kind))

    def with_schedule(self, kind: ScheduleKind) -> Self:
        """Return a catalog with another value of `schedule.name`."""
        return replace(self, schedules=(*self.schedules, kind))

    def with_metric(self, metric: Metric) -> Self:
        """Return a catalog with another metric of each training step."""
        return replace(self, metrics=(*self.metrics, metric))

    def with_format(self, kind: Format) -> Self:
        """Return a catalog with another format of text, and value of `data.format`."""
        return replace(self, formats=(*self.formats, kind))

    def schema(self, base: type) -> type:
        """Return the dataclass of a command's keys, with the keys of these parts.

        `base` is the dataclass without the added parts, such as `Config`.
        """
        if self == Catalog():
            return base
        if base not in self._schemas:
            self._schemas[base] = self._extended(base)
        return self._schemas[base]

    @functools.cached_property
    def _schemas(self) -> dict[type, type]:
        """The results of `schema`, because equal configs must have the same type."""
        return {}

    def _extended(self, base: type) -> type:
        sections = {
            key.name: self._sections[key.type]
            for key in fields(base)
            if key.type in self._sections
        }
        attributes = {}
        if hasattr(base, "run_schema"):
            attributes["run_schema"] = self.schema(Config)
        if "format" in {key.name for key in fields(base)}:
            base = with_own(base, "format", self.formats)
        return with_sections(base, sections, **attributes)

    @functools.cached_property
    def _sections(self) -> Mapping[Any, type]:
        """The dataclasses of sections with these parts, by those without them."""
        mixers = MIXERS | {kind.name: kind for kind in self.mixers}
        train = _TrainConfig if self.losses else TrainConfig
        return {
            ModelSection: model_section(mixers, self.mlps),
            DataConfig: with_own(DataConfig, "format", self.formats),
            OptimizerConfig: with_own(OptimizerConfig, "name", self.optimizers),
            ScheduleConfig: with_own(ScheduleConfig, "name", self.schedules),
            TrainConfig: with_own(train, "loss", self.losses, metrics=self.metrics),
        }

    def mistakes(self) -> list[Mistake]:
        """Return the mistakes in the records: types, names, and keys."""
        mistakes = list[Mistake]()
        for key, kind, section, choice in (
            ("mixers", MixerKind, ModelSection, "mixer"),
            ("mlps", MLPKind, ModelSection, "mlp"),
            ("losses", LossKind, _TrainConfig, "loss"),
            ("optimizers", OptimizerKind, OptimizerConfig, "name"),
            ("schedules", ScheduleKind, ScheduleConfig, "name"),
            ("metrics", Metric, None, ""),
            ("formats", Format, DataConfig, "format"),
        ):
            taken = {*_METRICS}
            if section is not None:
                taken = names_in(get_type_hints(section)[choice])
            for part in getattr(self, key):
                mistakes += _part_mistakes(f"catalog.{key}", part, kind, taken)
                taken.add(getattr(part, "name", ""))
        return [*mistakes, *self._collisions()]

    def _collisions(self) -> Iterator[Mistake]:
        """Yield mistakes of mixers and MLPs whose keys would lie in the same place."""
        parts = *self.mixers, *self.mlps
        with_section = [part for part in parts if getattr(part, "section", None)]
        for number, part in enumerate(with_section):
            for other in with_section[:number]:
                if part.name == other.name and part in self.mlps:
                    rule = "is the name of a mixer too, and both have keys below "
                    rule += f"model.parts.{part.name}. Give the MLP another name"
                    yield Mistake("catalog.mlps", part.name, rule)
                elif part.section is other.section:
                    rule = f"has the section of {other.name}. Give it a dataclass of "
                    rule += "its own, as config.part(section) finds keys by it"
                    yield Mistake(f"catalog.{part.name}.section", part.section, rule)


CATALOG = Catalog()


def _part_mistakes(
    key: str, part: Any, kind: type, taken: set[str]
) -> Iterator[Mistake]:
    """Yield the mistakes in one record. `taken` holds names that it cannot have."""
    if not isinstance(part, kind):
        yield Mistake(key, type(part).__name__, f"must be a {kind.__name__}")
        return
    if not isinstance(part.name, str) or not _NAME.fullmatch(part.name):
        rule = "is no name: use lower-case letters, digits and underscores"
        yield Mistake(key, part.name, rule)
    elif part.name in taken:
        yield Mistake(key, part.name, "is taken. Choose a name that is free")
    section: Any = getattr(part, "section", None)
    if section is None:
        return
    key = f"{key}.{part.name}"
    params = getattr(section, "__dataclass_params__", None)
    if params is None or not params.frozen:
        rule = "must be a frozen dataclass: write @dataclass(frozen=True)"
        yield Mistake(f"{key}.section", section, rule)
        return
    try:
        hash(section())
    except TypeError as error:
        rule = f"needs a hashable default for each key: {error}"
        yield Mistake(f"{key}.section", section.__name__, rule)
    for name, hint in get_type_hints(section, include_extras=True).items():
        if not any(isinstance(m, Doc) for m in getattr(hint, "__metadata__", ())):
            rule = 'needs a sentence: Annotated[type, Doc("What it does.")]'
            yield Mistake(f"{key}.section.{name}", "", rule)
