"""Make meshes on stand-ins for machines, without compilers, and steps on them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

from jax.sharding import Mesh

from train.config import Config
from train.hardware import devices as topology
from train.hardware.chips import Chip
from train.hardware.targets import parse_target
from train.plan.advice import Advice, advise
from train.plan.cost import CollectiveTotal, Flops, HbmBytes, SectionCost, StepCost
from train.plan.roofline import Prediction, predict
from train.plan.scaling import ScalingPoint, weak_scaling
from train.resolve.mesh import make_mesh

# The dims of this model fill every matrix unit.
FULL = (
    *("model=llama3_8b", "model.num_heads=16", "model.num_kv_heads=16"),
    *("model.vocab_size=131072", "tracker=none"),
)


class Machine(NamedTuple):
    config: Config
    mesh: Mesh
    chip: Chip

    def predict(self, cost: StepCost) -> Prediction:
        """Predict a step on the batch of the config."""
        model = self.config.model
        data = self.config.data
        return predict(cost, model, data, mesh=self.mesh, chip=self.chip)

    def weak_scaling(self, cost: StepCost) -> list[ScalingPoint]:
        """Predict a step with the same rows on other numbers of slices."""
        model = self.config.model
        data = self.config.data
        return weak_scaling(cost, model, data, mesh=self.mesh, chip=self.chip)

    def advise(self, prediction: Prediction) -> Advice:
        """Return advice for a predicted step of the config."""
        config = self.config
        return advise(
            prediction, model=config.model, data=config.data, train=config.train
        )


def machine(
    composed: Callable[..., Config],
    name: str,
    overrides: Sequence[str],
    base: Sequence[str] = FULL,
) -> Machine:
    """Lay a config out on stand-ins for the devices of a target."""
    target = parse_target(name)
    config = composed([*base, *overrides])
    with mock.patch.object(topology.importlib.util, "find_spec", return_value=None):
        devices = topology.fake_devices(target)
    return Machine(config, make_mesh(config.mesh, devices), target.chip)


def execution(
    products: float,
    memory: int,
    *sent: CollectiveTotal,
    product_bytes: int = 0,
    needed: float = 0.0,
) -> StepCost:
    """Return a step with these FLOPs and bytes.

    `needed` is the FLOPs of the model, which are `products` if it is zero. Of the
    `memory` bytes, instructions with matrix products move `product_bytes`.
    """
    hbm_bytes = HbmBytes(product_bytes, memory - product_bytes)
    step = SectionCost("step", Flops(products), hbm_bytes, list(sent))
    return StepCost(needed or products, (step,), [])


def in_one_section(cost: StepCost, flops: Flops | None = None) -> StepCost:
    """Join the sections of a step, which then overlap; `flops` replaces its FLOPs."""
    section = SectionCost("step", flops or cost.flops, cost.hbm_bytes, cost.sent)
    return replace(cost, sections=(section,))


def total(
    axes: str, network: str, sent: float, overlapped: float = 0.0
) -> CollectiveTotal:
    """Return the total of one gather along mesh axes, whose names spaces separate."""
    names = tuple(axes.split())
    return CollectiveTotal(names, network, "all-gather", 1, int(sent), sent, overlapped)
