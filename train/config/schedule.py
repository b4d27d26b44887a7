"""The schedule of learning rates."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

from data.config import Count, DataConfig, Number
from data.phases import step_at
from train.config.bounds import NotNegative, Positive
from train.own_parts import chosen_part


class Schedule(StrEnum):
    """The shape of the learning rate after the warm-up."""

    constant = "constant"
    cosine = "cosine"
    wsd = "wsd"
    power = "power"
    piecewise = "piecewise"


class DecayShape(StrEnum):
    """How a decay falls with the fraction x of its steps: 1 - x, or 1 - sqrt(x)."""

    linear = "linear"
    sqrt = "sqrt"


class BatchRule(StrEnum):
    """How learning rates follow the number of tokens in a batch.

    They do not follow it, are proportional to its root, or are proportional to it.
    """

    none = "none"
    sqrt = "sqrt"
    linear = "linear"


@dataclass(frozen=True)
class SchedulePoint:
    """A point of a piecewise schedule, at a step, a number of tokens or a fraction."""

    step: Annotated[Number | None, Doc("The step of the point.")] = None
    tokens: Annotated[
        NotNegative | None, Doc("The number of positions before the step of the point.")
    ] = None
    fraction: Annotated[
        Annotated[float, Ge(0), Le(1)] | None,
        Doc("The position of the point as a fraction of the steps of the run."),
    ] = None
    factor: Annotated[NotNegative, Doc("The factor on every learning rate there.")] = (
        1.0
    )

    def step_of(self, num_steps: int) -> int:
        """Return the step of a point without `tokens` in a run of `num_steps`."""
        if self.step is not None:
            return self.step
        return round((self.fraction or 0.0) * num_steps)


@dataclass(frozen=True)
class ScheduleConfig:
    """The factor on every learning rate, as a function of the step."""

    name: Annotated[
        Schedule,
        Doc(
            "The shape after the warm-up. wsd stays at the peak, and power falls like "
            "a power of the step; both end with a decay. piecewise connects points."
        ),
    ] = Schedule.cosine
    warmup_steps: Annotated[
        Number, Doc("The number of steps in which the factor rises linearly to 1.")
    ] = 100
    warmup_tokens: Annotated[
        NotNegative | None,
        Doc(
            "The number of positions of the warm-up, as in the metric `positions`. "
            "null: warmup_steps decides."
        ),
    ] = None
    decay_steps: Annotated[
        Count | None,
        Doc(
            "The number of last steps in which wsd and power decay. null: "
            "decay_fraction decides."
        ),
    ] = None
    decay_fraction: Annotated[
        float,
        Gt(0),
        Le(1),
        Doc(
            "The number of steps of a decay, as a fraction of the steps until its end. "
            "1 decays from the end of the warm-up on."
        ),
    ] = 0.3
    decay_shape: Annotated[
        DecayShape, Doc("How a decay falls: linearly, or like 1 - sqrt(x).")
    ] = DecayShape.linear
    earlier_decays: Annotated[
        list[Count],
        Doc(
            "Ascending steps at which wsd or power has decayed too, before it returns "
            "to its rate. Checkpoints at these steps are results of shorter runs."
        ),
    ] = field(default_factory=list)
    power_exponent: Annotated[
        Positive, Doc("power falls like the step to the power of -power_exponent.")
    ] = 0.51
    power_start_step: Annotated[
        Count | None,
        Doc("The step from which power falls. null: the end of the warm-up."),
    ] = None
    points: Annotated[
        list[SchedulePoint],
        Doc(
            "The points of piecewise, each with a factor and a step, a number of "
            "tokens or a fraction."
        ),
    ] = field(default_factory=list)
    batch_rule: Annotated[
        BatchRule,
        Doc(
            "How learning rates follow the positions of a batch: sqrt and linear "
            "multiply them by the root of the ratio to base_batch_tokens, or by the "
            "ratio."
        ),
    ] = BatchRule.none
    base_batch_tokens: Annotated[
        Positive | None,
        Doc(
            "The positions in a batch of the run whose rates are given. null: "
            "data.batch_size x data.sequence_length, so that rates follow only "
            "data.batch_schedule and data.sequence_schedule."
        ),
    ] = None
    final_fraction: Annotated[
        float, Ge(0), Le(1), Doc("The factor at the end, as a fraction of the peak.")
    ] = 0.1

    def batch_factor(self, tokens: int) -> float:
        """Return the factor on learning rates for batches of this number of tokens."""
        powers = {BatchRule.none: 0.0, BatchRule.sqrt: 0.5, BatchRule.linear: 1.0}
        return (tokens / (self.base_batch_tokens or tokens)) ** powers[self.batch_rule]

    def in_steps(self, data: DataConfig) -> "ScheduleConfig":
        """Return the same schedule with steps in place of numbers of tokens.

        The result is valid only for the batches of `data`.
        """
        warmup = self.warmup_tokens
        return replace(
            self,
            warmup_steps=self.warmup_steps if warmup is None else step_at(data, warmup),
            warmup_tokens=None,
            points=[
                p
                if p.tokens is None
                else replace(p, step=step_at(data, p.tokens), tokens=None)
                for p in self.points
            ],
        )

    def own_body(self, num_steps: int) -> Callable[[Any], Any] | None:
        """Return the factor on the steps after the warm-up, if a user has added it."""
        own = chosen_part(self, "name")
        return None if own is None else own.part.make(own.values, num_steps)

    @property
    def ends_at_zero(self) -> bool:
        """Whether `final_fraction` makes the last learning rate zero."""
        has_end = self.has_decay or self.name is Schedule.cosine
        return has_end and self.final_fraction == 0

    @property
    def has_decay(self) -> bool:
        """Whether the run ends with a decay whose start depends on its length."""
        return self.name in (Schedule.wsd, Schedule.power)

    def decays(self, num_steps: int) -> list[tuple[int, int]]:
        """Return the first step of each decay, and the step at which it ends."""
        ends = [step for step in self.earlier_decays if step < num_steps]
        decays = list[tuple[int, int]]()
        begin = self.warmup_steps
        for end in [*ends, num_steps]:
            steps = self.decay_steps or max(1, round(self.decay_fraction * end))
            decays.append((max(begin, end - steps), end))
            begin = end
        return decays

    def decay_start(self, num_steps: int) -> int:
        """Return the first step of the last decay."""
        return self.decays(num_steps)[-1][0]

    def piecewise_points(self, num_steps: int) -> list[tuple[int, float]]:
        """Return the step and the factor of each point."""
        return [(point.step_of(num_steps), point.factor) for point in self.points]
