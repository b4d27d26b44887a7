"""Measure the loads of the experts, and move routers' biases towards equal loads.

Shapes: L layers with experts, E experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.config import ModelConfig
from model.params import LAYERS, layer_trees

Load = Float[Array, "L E"] | None


def relative_load(load_LE: Float[Array, "L E"]) -> Float[Array, "L"]:
    """Return the load of each layer's busiest expert, divided by the mean load."""
    # A batch may consist of padding only, so that the mean is zero.
    mean_L = jnp.maximum(jnp.mean(load_LE, axis=1), 1e-9)
    return jnp.max(load_LE, axis=1) / mean_L


def balance_experts(
    params: Any, load_LE: Load, accepted: jax.Array, config: ModelConfig
) -> Any:
    """Return parameters whose router biases are moved one step towards equal loads.

    A step that is not accepted changes nothing.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    if load_LE is None or not config.router_bias_rate:
        return params
    direction_LE = jnp.sign(jnp.mean(load_LE, axis=1, keepdims=True) - load_LE)
    # Copy only the dicts.
    params = jax.tree.map(lambda x: x, params)
    start = 0

    def move(router: dict[str, jax.Array], rows: jax.Array) -> None:
        balance = router["balance"] + config.router_bias_rate * rows
        router["balance"] = jnp.where(accepted, balance, router["balance"])

    for slots in layer_trees(params[LAYERS]):
        routers = [p["mlp"]["router"] for p in slots if "router" in p["mlp"]]
        stop = start + sum(len(router["balance"]) for router in routers)
        for slot, router in enumerate(routers):
            move(router, direction_LE[start + slot : stop : len(routers)])
        start = stop
    for k, module in params.get("predict_ahead", {}).items():
        move(module["block"]["mlp"]["router"], direction_LE[start + int(k)])
    return params
