"""What a GPT is: its shape and its choices, nothing about how it is run."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le

from model.choices import (
    Activation,
    Attention,
    ComputeDtype,
    Count,
    Depth,
    Dropout,
    Dtype,
    Init,
    Mlp,
    Norm,
    NormPlacement,
    NormSpan,
    Number,
    Position,
    RopeScaling,
    Scaling,
    Scores,
    Size,
)

VOCAB_MULTIPLE = 128  # large vocabularies are padded to it
_PADDED_FROM = 1024

# What a dim of a parameter or an activation is; rule tables map them to mesh axes.
LOGICAL_AXES = (
    *("batch", "seq", "vocab", "embed", "heads", "kv_heads", "head_dim"),
    *("mlp", "experts", "layers"),
)

# What a layer makes that its backward pass keeps, or else computes again. `attention`
# is the kernel's output and log-sum-exp: with it the kernel's forward pass runs once
# (of `xla`, which has none, it is the output). The others are results of products with
# a weight; that of mlp_down is not among them, since nothing needs it.
Intermediate = Literal[
    "query", "key", "value", "attention", "attention_output", "mlp_gate", "mlp_up"
]
INTERMEDIATES: tuple[Intermediate, ...] = get_args(Intermediate)

# What of a layer can wait for its backward pass in host memory: the residual stream
# that it starts from, and its intermediate results.
OffloadName = Literal["residual", Intermediate]

# How far the queries of a layer see: `model.window` keys, or all before them.
Reach = Literal["local", "global"]


@dataclass(frozen=True)
class ModelConfig:
    """Shape and choices of a GPT. Sizes are of the whole model, not of a device."""

    name: str = "gpt"  # for the run's name
    num_layers: Depth = 4  # blocks of attention and MLP
    num_heads: Size = 4  # query heads
    # Key and value heads: fewer is grouped-query attention; null: as many as num_heads.
    num_kv_heads: Size | None = None
    embed_dim: Size = 128  # width of the residual stream
    head_dim: Size | None = None  # null: embed_dim / num_heads
    mlp_dim: Size | None = None  # null: 4 embed_dim
    # Null: the tokenizer's, up to a multiple of 128.
    vocab_size: Size | None = None
    max_sequence_length: Size | None = None  # learned positions; null: the data's

    norm: Norm = Norm.rmsnorm  # before each block and before the head
    norm_placement: NormPlacement = NormPlacement.before  # in each layer
    norm_unit_offset: bool = False  # norms multiply by 1 + scale, zero at first
    norm_epsilon: Annotated[float, Gt(0)] = 1e-5  # added to the mean square
    position: Position = Position.rotary  # how the model knows where a token stands
    # The longest wavelength of rotary positions / 2 pi.
    rope_theta: Annotated[float, Gt(1)] = 10000.0
    # The same of local layers, which are not scaled then; null: as in the others.
    rope_theta_local: Annotated[float, Gt(0)] | None = None
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    # The part of each head that is rotated; 1: the whole head.
    rotary_fraction: Annotated[float, Gt(0), Le(1)] = 1.0
    # Keys that a query of a local layer sees, itself included; null: none is local.
    window: Count | None = None
    # Which layers are local, repeated over the depth; null: all, if there is a window.
    layer_pattern: tuple[Reach, ...] | None = None
    # The cap c of c tanh(score / c) in attention; null: none.
    attention_soft_cap: Annotated[float, Gt(0)] | None = None
    # Scores are divided by this number's root; null: by that of the head's dim.
    query_scale_dim: Size | None = None
    # Each head may attend to nothing: a learned score takes a part of the weights.
    attention_sinks: bool = False
    activation: Activation = Activation.swiglu  # of the MLP; those on -glu add a gate
    swiglu_alpha: Annotated[float, Gt(0)] = 1.702  # of clamped_swiglu: its steepness
    swiglu_limit: Annotated[float, Gt(0)] = 7.0  # ... and what holds gate and up
    qk_norm: bool = False  # normalise queries and keys
    qk_norm_over: NormSpan = NormSpan.head  # each head's, or all together
    tied_head: bool = False  # the embedding is the head's weight too
    bias: bool = False  # in linear layers, experts, their router, and LayerNorm
    qkv_bias: bool = False  # of queries, keys and values, whatever the others have
    scaled_embedding: bool = False  # a token's row, times sqrt(embed_dim)
    # The cap c of c tanh(logits / c); null: none.
    logit_soft_cap: Annotated[float, Gt(0)] | None = None
    mlp: Mlp = Mlp.dense  # moe: experts, of which each token takes a few
    num_experts: Size = 8  # in each layer that has experts
    experts_per_token: Size = 2  # that the router chooses
    expert_dim: Size | None = None  # hidden dim of an expert; null: mlp_dim
    shared_experts: Number = 0  # that every token takes besides
    dense_layers: Number = 0  # the first ones, with an MLP instead
    experts_every: Count = 1  # layers behind these: the last of as many has experts
    router: Scores = Scores.softmax  # scores of all experts together, or one by one
    router_normalized: bool = True  # the weights of a token's experts add up to 1
    # Weight of the loss E sum(load x mean score), a mean over layers: 1 if all experts
    # get the same load. That of transformers is experts_per_token times as large.
    router_aux_weight: Annotated[float, Ge(0)] = 0.0
    # Added after each step to the bias of an expert that got less than the mean, and
    # taken off where it got more; it only chooses, outside of the gradient; 0: none.
    router_bias_rate: Annotated[float, Ge(0)] = 0.0
    router_z_weight: Annotated[float, Ge(0)] = 0.0  # of the squared log of the sum
    dropout: Dropout = field(default_factory=Dropout)
    init: Init = Init.scaled  # standard deviations of the matrices
    embedding_std: Annotated[float, Gt(0)] = 0.02  # of the embedding at the start

    param_dtype: Dtype = Dtype.float32  # of the weights as they are kept
    # Of the operands of matrix products; float8 (NVIDIA) and int8 (TPU): in the linear
    # layers of attention and MLP.
    compute_dtype: ComputeDtype = ComputeDtype.auto
    # Layers whose products have no eight bits then: first, last, or numbers from 0.
    high_precision_layers: tuple[Number | Literal["first", "last"], ...] = ()
    attention: Attention = Attention.auto  # kernel
    layer_unroll: Count | Literal[-1] = 1  # layers a scan iteration; -1: all, no loop

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding table and columns of the head, padding included.

        A large vocabulary is padded to a multiple of 128: matrix units are fast on it,
        and tensor parallelism divides it. It does not depend on the mesh, so that a
        checkpoint is restored on any.
        """
        assert self.vocab_size is not None, "settled by train/program.py"
        if self.vocab_size < _PADDED_FROM:
            return self.vocab_size
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, K."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Dim of a head, H."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def gated(self) -> bool:
        """Whether an MLP has a gate."""
        return self.activation.gated

    @property
    def mlp_size(self) -> int:
        """Hidden dim of the MLP, F."""
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def expert_size(self) -> int:
        """Hidden dim of an expert."""
        return self.expert_dim or self.mlp_size

    @property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        rest = self.num_layers - self.dense_layers
        return rest // self.experts_every if self.mlp is Mlp.moe else 0

    @property
    def layers_before_experts(self) -> int:
        """How many layers come before those with experts and what is between them."""
        return self.dense_layers if self.mlp is Mlp.moe else 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, None where it sees all before a query."""
        pattern = self.layer_pattern or ("local",)
        repeated = itertools.islice(itertools.cycle(pattern), self.num_layers)
        return tuple(self.window if reach == "local" else None for reach in repeated)

    @property
    def precise(self) -> tuple[bool, ...]:
        """Of each layer, whether it is one of `high_precision_layers`."""
        ends = {"first": 0, "last": self.num_layers - 1}
        kept = {ends.get(str(layer), layer) for layer in self.high_precision_layers}
        return tuple(layer in kept for layer in range(self.num_layers))

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dims rotary positions rotate; even."""
        return int(self.head_size * self.rotary_fraction) // 2 * 2

    def mistakes(self) -> list[tuple[str, object, str]]:
        """List what does not go together as (field, value, rule and remedy)."""
        rules = *self._shape_rules(), *self._choice_rules(), *self._expert_rules()
        return [(f, attrgetter(f)(self), rule) for ok, f, rule in rules if not ok]

    def _shape_rules(self) -> Iterator[tuple[bool, str, str]]:
        """Yield (whether it holds, field, rule and remedy)."""
        yield (
            self.head_dim is not None or self.embed_dim % self.num_heads == 0,
            "embed_dim",
            f"must be divisible by model.num_heads={self.num_heads}; "
            "change one of them or set model.head_dim",
        )
        yield (
            self.num_heads % self.kv_heads == 0,
            "num_kv_heads",
            f"must divide model.num_heads={self.num_heads}; "
            "each key/value head serves the same number of query heads",
        )
        yield (
            self.position is not Position.rotary or self.rotary_dim >= 2,
            "rotary_fraction",
            f"leaves {self.rotary_dim} of {self.head_size} head dims to rotate; "
            "raise it, or choose model.position=learned",
        )

    def _choice_rules(self) -> Iterator[tuple[bool, str, str]]:
        yield (
            self.rope_theta_local is None or self.window is not None,
            "rope_theta_local",
            "is of local layers, of which there are none; set model.window",
        )
        scaling = self.rope_scaling
        turns = scaling.kind in (Scaling.llama3, Scaling.yarn)
        yield (
            not turns or scaling.original_length is not None,
            "rope_scaling.original_length",
            f"must be set with model.rope_scaling.kind={scaling.kind}: how long rows "
            "were when the model was trained without it",
        )
        yield (
            not turns or scaling.slow_turns < scaling.most_turns,
            "rope_scaling.slow_turns",
            f"must be below model.rope_scaling.fast_turns={scaling.most_turns:g}",
        )
        yield (
            self.layer_pattern is None or self.window is not None,
            "window",
            "must be set with model.layer_pattern: it says how many keys a query of a "
            "local layer sees",
        )
        yield (
            self.layer_pattern is None or {*self.layer_pattern} == {"local", "global"},
            "layer_pattern",
            "must have local and global layers; null, with model.window, makes all "
            "local, null without it all global",
        )
        yield (
            self.param_dtype is not Dtype.auto,
            "param_dtype",
            "must be float32 or bfloat16",
        )
        kept, dtype = self.high_precision_layers, self.compute_dtype
        yield (
            not kept or dtype in ("float8", "int8"),
            "high_precision_layers",
            f"must be [] with model.compute_dtype={dtype}: layers are left out of "
            "float8 or int8 alone",
        )
        numbers = [layer for layer in kept if isinstance(layer, int)]
        yield (
            {*numbers} <= {*range(self.num_layers)} and not all(self.precise),
            "high_precision_layers",
            f"must be first, last, or numbers below model.num_layers={self.num_layers},"
            " and leave other layers; with none take model.compute_dtype=auto",
        )

    def _expert_rules(self) -> Iterator[tuple[bool, str, str]]:
        if self.mlp is not Mlp.moe:
            return
        yield (
            self.experts_per_token <= self.num_experts,
            "experts_per_token",
            f"must be at most model.num_experts={self.num_experts}",
        )
        yield (
            self.dense_layers < self.num_layers,
            "dense_layers",
            f"must be below model.num_layers={self.num_layers}, or no layer has "
            "experts; lower it, or choose model.mlp=dense",
        )
        yield (
            (self.num_layers - self.dense_layers) % self.experts_every == 0,
            "experts_every",
            f"must divide the {self.num_layers - self.dense_layers} layers behind "
            "model.dense_layers: the last of each group of as many has experts",
        )
