"""A mixture-of-experts MLP: each token passes through a few of many experts.

A router scores the experts for each token. The outputs of the k best experts, weighted
by the router, are summed. No token is dropped, and no expert is padded to a capacity:
rows are sorted by expert and multiplied by `grouped_product`.

Shapes: B batch, T time, k experts of each token, D embed, F an expert's hidden dim, E
experts.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from model.axes import mesh_axes
from model.config import ModelConfig
from model.execution import CallContext, Execution
from model.layers import MLP, stds
from model.params import Kind, ParamInfo
from model.parts.experts.exchange import run_on_device
from model.parts.experts.local_experts import LocalExperts, Output, Tokens
from model.parts.experts.router import Choice, Router, Routing
from model.products import gather_weight, product
from model.scopes import part_scope


class Experts(nnx.Module):
    """A router, its experts, and an optional shared MLP for every token."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        """Create router, experts and the shared MLP; biases start at zero."""
        D = config.embed_dim
        E = config.num_experts
        F = config.expert_size
        dtype = jnp.dtype(config.param_dtype)
        std, _ = stds(config, D)
        _, residual_std = stds(config, F)
        self.config = config

        def weight(std: float, *dims: tuple[str, int]) -> nnx.Param:
            axes, shape = zip(*dims, strict=True)
            value = std * jax.random.normal(rngs.params(), shape, dtype)
            return nnx.Param(value, info=ParamInfo(axes, Kind.matrix, 1))

        def bias(*dims: tuple[str, int]) -> nnx.Param | None:
            axes, shape = zip(*dims, strict=True)
            zeros = jnp.zeros(shape, dtype)
            info = ParamInfo(axes, Kind.vector)
            return nnx.Param(zeros, info=info) if config.bias else None

        embed = ("embed", D)
        experts = ("experts", E)
        hidden = ("mlp", F)
        self.router = Router(config, rngs)
        self.up = weight(std, experts, embed, hidden)
        self.gate = weight(std, experts, embed, hidden) if config.gated else None
        self.down = weight(residual_std, experts, hidden, embed)
        self.up_bias = bias(experts, hidden)
        self.gate_bias = bias(experts, hidden) if config.gated else None
        self.down_bias = bias(experts, embed)
        shared_size = config.shared_experts * F
        self.shared = MLP(config, shared_size, rngs) if shared_size else None
        has_gate = config.shared_expert_gate and shared_size
        self.shared_gate = weight(std, embed) if has_gate else None

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        segment_ids_BT: Int[Array, "B T"] | None,
        execution: Execution,
        call: CallContext,
    ) -> tuple[Float[Array, "B T D"], Routing]:
        """Return outputs, and balance statistics that exclude padding (segment 0)."""
        with part_scope("router"):
            choice, routing = self.router(x_BTD, segment_ids_BT, execution)
        y_BTD = self._run_routed(x_BTD, choice, execution, call)
        if self.shared is not None:
            with part_scope("shared"):
                shared_BTD = self.shared(x_BTD, execution, call)
                if self.shared_gate is not None:
                    gate_BT1 = self._gate_shared(x_BTD, self.shared_gate, execution)
                    shared_BTD = (gate_BT1 * shared_BTD).astype(shared_BTD.dtype)
                y_BTD = y_BTD + shared_BTD
        return y_BTD, routing

    def _gate_shared(
        self, x_BTD: Float[Array, "B T D"], gate: nnx.Param, execution: Execution
    ) -> Float[Array, "B T 1"]:
        """Return the float32 gate of the shared experts' output, sigmoid(x w)."""
        logits_BT = product(
            "btd,d->bt",
            x_BTD.astype(jnp.float32),
            gate[...],
            execution.numerics.compute_dtype,
            placement=execution.weight_placement(_axes(gate)),
        )
        return jax.nn.sigmoid(logits_BT)[..., None]

    def _run_routed(
        self,
        x_BTD: Float[Array, "B T D"],
        choice: Choice,
        execution: Execution,
        call: CallContext,
    ) -> Float[Array, "B T D"]:
        """Sum the outputs of a token's experts, weighted by the router.

        Matrices are gathered once for all chunks of tokens (`exchange.py`),
        except along the dim of experts. If matrices or experts are sharded, the
        backward pass gathers and computes everything again.
        """
        matrix_params = [p for p in (self.up, self.gate, self.down) if p is not None]
        bias_params = [self.up_bias, self.gate_bias, self.down_bias]
        bias_params = [p for p in bias_params if p is not None]
        placements = [execution.weight_placement(_axes(p)) for p in matrix_params]
        expert_axes = dict(placements[0].sharded_dims).get(0, ())
        placements = [p.without_dims([0]) for p in placements]
        numerics = execution.numerics
        placement = execution.placement
        float8 = None if call.high_precision else numerics.expert_quantization
        automatic = placement.automatic_axes
        hidden_entry = placement.param_spec(("mlp",))[0] if automatic else None

        def run_device(
            tokens: Tokens, matrices: list[jax.Array], biases: list[jax.Array]
        ) -> Output:
            experts = LocalExperts(
                matrices,
                biases,
                self.config,
                execution,
                call,
                expert_axes=expert_axes,
                hidden_axes=mesh_axes(hidden_entry),
            )
            return run_on_device(tokens, experts)

        if automatic:  # XLA cannot partition a kernel.
            token_spec = placement.spec("batch", "seq", None)
            matrix_specs, bias_specs = (
                [
                    PartitionSpec(*(hidden_entry if a == "mlp" else None for a in axes))
                    for axes in map(_axes, params)
                ]
                for params in (matrix_params, bias_params)
            )
            run_device = placement.map_shards(
                run_device,
                in_specs=(token_spec, matrix_specs, bias_specs),
                out_specs=Output._make([token_spec, PartitionSpec()]),
            )

        def run(x_BTD, weights_BTk, matrices, biases) -> Output:
            gathered: list[jax.Array] = [
                gather_weight(matrix, p, numerics.compute_dtype, float8)
                for matrix, p in zip(matrices, placements, strict=True)
            ]
            tokens = Tokens(x_BTD, choice.experts, weights_BTk)
            return run_device(tokens, gathered, biases)

        if expert_axes or any(p.sharded_dims for p in placements):
            run = jax.checkpoint(run)
        matrices = [p[...] for p in matrix_params]
        biases = [p[...] for p in bias_params]
        y_BTD, counts = run(x_BTD, choice.weights, matrices, biases)
        if call.taps is not None and counts is not None:
            call.taps.note_rounding(counts)
        return y_BTD


def _axes(param: nnx.Param) -> tuple[str, ...]:
    return param.get_metadata("info").axes
