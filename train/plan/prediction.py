"""The speed of a step, as a range. How it comes about: train/plan/roofline.py.

FLOPs, bytes and seconds are of one JAX device and one step.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """A figure between two, which are in order."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The mean."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Lane:
    """One network along one set of mesh axes.

    bandwidth: bytes a second that a device can send.
    seconds: that its collectives take, if nothing else slows them.
    hidden: seconds of those that are scheduled beside matrix products.
    waited_for: of the others, seconds that no schedule could hide.
    """

    axes: tuple[str, ...]
    network: str
    bandwidth: float
    sent: float
    seconds: float
    hidden: float
    waited_for: float

    @property
    def exposed(self) -> float:
        """Seconds of collectives that nothing is scheduled beside."""
        return self.seconds - self.hidden

    @property
    def name(self) -> str:
        """For people."""
        return f"{' and '.join(self.axes) or 'no axis'} over {self.network}"


@dataclass(frozen=True)
class Speed:
    """What a step that takes so long gives."""

    step_s: float
    tokens_per_second: float
    tokens_per_second_per_chip: float
    mfu: float


@dataclass(frozen=True)
class Prediction:
    """The speed of a program.

    products: seconds of matrix products, if memory is no obstacle.
    memory: seconds of all memory traffic; product_memory: of those beside products.
    lanes: networks, the busiest first.
    fill: part of the matrix units that the dims of the products use.
    recomputed: executed FLOPs over the model's.
    step_s: seconds of a step.
    tokens: of a step, all devices together.
    peak: the model's FLOPs in a second at an MFU of 1.
    how: compiled or estimated, what all this was computed from.
    platform: tpu or gpu.
    """

    products: float
    memory: float
    product_memory: float
    lanes: tuple[Lane, ...]
    fill: float
    recomputed: float
    step_s: Range
    tokens: int
    devices: int
    chips: int
    model_flops: float
    peak: float
    how: str
    platform: str

    def at(self, step_s: float) -> Speed:
        """Give the speed of steps of this many seconds (MFU: train/flops.py)."""
        rate = self.tokens / step_s
        mfu = self.model_flops / step_s / self.peak
        return Speed(step_s, rate, rate / self.chips, mfu)

    @property
    def middle(self) -> Speed:
        """The one figure, if there must be one."""
        return self.at(self.step_s.middle)

    @property
    def tokens_per_second(self) -> Range:
        """Of all devices."""
        return self._range("tokens_per_second")

    @property
    def tokens_per_second_per_chip(self) -> Range:
        """Of one chip."""
        return self._range("tokens_per_second_per_chip")

    @property
    def mfu(self) -> Range:
        """Model FLOPs utilization (convention: train/flops.py)."""
        return self._range("mfu")

    def _range(self, field: str) -> Range:
        slow, fast = self.at(self.step_s.high), self.at(self.step_s.low)
        return Range(getattr(slow, field), getattr(fast, field))

    def as_json(self) -> dict[str, Any]:
        """Give all figures as plain values."""
        ranges = ("tokens_per_second", "tokens_per_second_per_chip", "mfu")
        return {
            **dataclasses.asdict(self),
            **{name: dataclasses.asdict(self._range(name)) for name in ranges},
            "middle": dataclasses.asdict(self.middle),
        }
