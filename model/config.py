"""The config of a GPT. Mesh and training have their own configs (train/config)."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

from model.choices import (
    Activation,
    Attention,
    ComputeDtype,
    Count,
    Depth,
    Dropout,
    Dtype,
    End,
    Init,
    Mlp,
    Norm,
    NormPlacement,
    NormSpan,
    NotNegative,
    Number,
    Position,
    Positive,
    Reach,
    RopeScaling,
    Scores,
    Size,
    TokenShift,
)

VOCAB_MULTIPLE = 128  # large vocabularies are padded to a multiple of this
_MIN_PADDED_VOCAB = 1024
LATENT_ATTENTION = "latent_attention"  # the name of the mixer in model/parts/latent/

# The logical axes. Rule tables map them to mesh axes (model/axes.py).
LOGICAL_AXES = (
    *("batch", "seq", "vocab", "embed", "heads", "kv_heads", "head_dim"),
    *("mlp", "experts", "layers"),
)


Section = TypeVar("Section")


class DeltaSizes(NamedTuple):
    """The numbers of heads and the dims of a gated delta net."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape and the choices of a GPT. Sizes are global, not per device."""

    name: Annotated[str, Doc("The model's part of the default run name.")] = "gpt"
    num_layers: Annotated[Depth, Doc("The number of blocks of attention and MLP.")] = 4
    num_heads: Annotated[Size, Doc("The number of query heads.")] = 4
    num_kv_heads: Annotated[
        Size | None,
        Doc("The number of key and value heads. null: num_heads."),
    ] = None
    embed_dim: Annotated[Size, Doc("The width of the residual stream.")] = 128
    head_dim: Annotated[
        Size | None, Doc("The dim of each head. null: embed_dim / num_heads.")
    ] = None
    mlp_dim: Annotated[
        Size | None, Doc("The hidden dim of the MLP. null: 4 embed_dim.")
    ] = None
    vocab_size: Annotated[
        Size | None,
        Doc("The number of tokens. null: the tokenizer's, up to a multiple of 128."),
    ] = None
    max_sequence_length: Annotated[
        Size | None, Doc("The number of learned positions. null: data.sequence_length.")
    ] = None

    # train/config/model.py restricts these two to the names of mixers.
    mixer: Annotated[
        str,
        Doc("How a layer mixes positions: attention, latent_attention or gated_delta."),
    ] = "attention"
    mixer_pattern: Annotated[
        tuple[str, ...] | None,
        Doc(
            "The mixers of layers, repeated over the depth. null: model.mixer "
            "everywhere."
        ),
    ] = None
    query_rank: Annotated[
        Size | None,
        Doc("latent_attention compresses queries to this dim. null: it does not."),
    ] = None
    kv_rank: Annotated[
        Size, Doc("latent_attention compresses keys and values to this dim.")
    ] = 512
    nope_head_dim: Annotated[
        Size,
        Doc("The dim of a latent_attention head's queries that is not rotated."),
    ] = 128
    rope_head_dim: Annotated[
        Size,
        Doc("The dim that is rotated. All heads of a layer share this part of keys."),
    ] = 64
    value_head_dim: Annotated[
        Size, Doc("The dim of the values of a latent_attention head.")
    ] = 128

    token_shift: Annotated[
        TokenShift,
        Doc(
            "Whether attention, the MLP or both take the first quarter of their input "
            "channels from the previous position of the document."
        ),
    ] = TokenShift.none

    norm: Annotated[
        Norm, Doc("The normalisation of each layer and of the head's input.")
    ] = Norm.rmsnorm
    norm_placement: Annotated[
        NormPlacement, Doc("Norms lie before attention and MLP, after them, or both.")
    ] = NormPlacement.before
    norm_unit_offset: Annotated[
        bool, Doc("Norms multiply by 1 + scale; the scale starts at zero.")
    ] = False
    norm_epsilon: Annotated[Positive, Doc("Norms add it to the mean square.")] = 1e-5
    position: Annotated[
        Position, Doc("How the model knows the position of a token.")
    ] = Position.rotary
    rope_theta: Annotated[
        float, Gt(1), Doc("The longest rotary wavelength, divided by 2 pi.")
    ] = 10000.0
    rope_theta_local: Annotated[
        Positive | None,
        Doc("The same for local layers, which ignore rope_scaling. null: rope_theta."),
    ] = None
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rotary_fraction: Annotated[
        float, Gt(0), Le(1), Doc("The fraction of each head that is rotated.")
    ] = 1.0
    window: Annotated[
        Count | None,
        Doc("How many keys a local query sees, its own too. null: no layer is local."),
    ] = None
    layer_pattern: Annotated[
        tuple[Reach, ...] | None,
        Doc("A repeated list of local, global. null: all local if there is a window."),
    ] = None
    attention_soft_cap: Annotated[
        Positive | None,
        Doc("Scores become c tanh(score / c) for this c. null disables the cap."),
    ] = None
    query_scale_dim: Annotated[
        Size | None,
        Doc("Scores are divided by the root of this number. null: the head's dim."),
    ] = None
    attention_sinks: Annotated[
        bool,
        Doc("A learned score per head takes a share of the weights, for no value."),
    ] = False
    attention_gate: Annotated[
        bool,
        Doc(
            "Each head's output is multiplied by a sigmoid, whose argument the "
            "projection of queries gives too."
        ),
    ] = False
    delta_key_heads: Annotated[
        Size | None,
        Doc("The number of key heads of a gated delta net. null: num_heads."),
    ] = None
    delta_value_heads: Annotated[
        Size | None,
        Doc("The number of its value heads, each with a state. null: delta_key_heads."),
    ] = None
    delta_key_dim: Annotated[
        Size | None, Doc("The dim of its keys and queries. null: that of attention.")
    ] = None
    delta_value_dim: Annotated[
        Size | None, Doc("The dim of its values. null: delta_key_dim.")
    ] = None
    delta_conv_width: Annotated[
        Size, Ge(2), Doc("The number of positions that its causal convolution sees.")
    ] = 4
    activation: Annotated[
        Activation, Doc("The MLP's non-linearity. Those that end in glu add a gate.")
    ] = Activation.swiglu
    swiglu_alpha: Annotated[Positive, Doc("The steepness of clamped_swiglu.")] = 1.702
    swiglu_limit: Annotated[
        Positive, Doc("The limit of clamped_swiglu's gate and values.")
    ] = 7.0
    qk_norm: Annotated[bool, Doc("Normalise queries and keys.")] = False
    qk_norm_over: Annotated[
        NormSpan, Doc("qk_norm covers each head, or all of them together.")
    ] = NormSpan.head
    tied_head: Annotated[bool, Doc("The head uses the embedding as its weight.")] = (
        False
    )
    bias: Annotated[
        bool, Doc("Linear layers, experts, router and LayerNorm have a bias.")
    ] = False
    qkv_bias: Annotated[
        bool, Doc("Queries, keys and values have a bias, even if bias is false.")
    ] = False
    scaled_embedding: Annotated[
        bool, Doc("Embeddings are multiplied by sqrt(embed_dim).")
    ] = False
    logit_soft_cap: Annotated[
        Positive | None,
        Doc("Logits become c tanh(logits / c) for this c. null disables the cap."),
    ] = None
    mlp: Annotated[Mlp, Doc("moe: experts, of which each token uses a few.")] = (
        Mlp.dense
    )
    num_experts: Annotated[
        Size, Doc("The number of experts in a layer that has them.")
    ] = 8
    experts_per_token: Annotated[
        Size, Doc("The number of experts that each token is sent to.")
    ] = 2
    expert_dim: Annotated[
        Size | None, Doc("The hidden dim of an expert. null: mlp_dim.")
    ] = None
    shared_experts: Annotated[Number, Doc("Further experts that every token uses.")] = 0
    shared_expert_gate: Annotated[
        bool,
        Doc("The shared experts' output is multiplied by a gate, sigmoid(x w)."),
    ] = False
    dense_layers: Annotated[
        Number, Doc("The number of first layers without experts.")
    ] = 0
    experts_every: Annotated[
        Count,
        Doc(
            "After dense_layers, the last layer of each group of this size has experts."
        ),
    ] = 1
    router: Annotated[Scores, Doc("Experts are scored together, or one by one.")] = (
        Scores.softmax
    )
    router_normalized: Annotated[bool, Doc("A token's expert weights add up to 1.")] = (
        True
    )
    router_groups: Annotated[
        Count, Doc("The number of equal groups of experts, in the order of experts.")
    ] = 1
    router_groups_kept: Annotated[
        Count, Doc("A token chooses experts only from this number of best groups.")
    ] = 1
    router_group_best: Annotated[
        Count,
        Doc("A group's score is the sum of this number of its best scores."),
    ] = 2
    routed_scaling: Annotated[
        Positive, Doc("The weights of a token's experts are multiplied by this.")
    ] = 1.0
    router_aux_weight: Annotated[
        NotNegative,
        Doc(
            "The weight of the loss E sum(load x mean score), averaged over layers: 1 "
            "if all experts have the same load. That of transformers is "
            "experts_per_token times as large."
        ),
    ] = 0.0
    router_sequence_aux_weight: Annotated[
        NotNegative,
        Doc(
            "The weight of the same loss, computed for each row alone and averaged "
            "over tokens and layers."
        ),
    ] = 0.0
    router_bias_rate: Annotated[
        NotNegative,
        Doc(
            "After each step it is added to the bias of experts with less load than "
            "the mean, and subtracted from the others. The bias only chooses experts "
            "and has no gradient. 0 disables it."
        ),
    ] = 0.0
    router_z_weight: Annotated[
        NotNegative, Doc("The weight of the router's squared log-sum-exp.")
    ] = 0.0
    predict_ahead: Annotated[
        Number,
        Doc(
            "The number of modules for multi-token prediction. Module k predicts the "
            "token k + 1 positions ahead; its loss has train.predict_ahead_weight."
        ),
    ] = 0
    dropout: Dropout = field(default_factory=Dropout)
    init: Annotated[Init, Doc("The initial standard deviations of the matrices.")] = (
        Init.scaled
    )
    embedding_std: Annotated[
        Positive, Doc("The embedding's initial standard deviation.")
    ] = 0.02

    param_dtype: Annotated[Dtype, Doc("The dtype of stored parameters.")] = (
        Dtype.float32
    )
    compute_dtype: Annotated[
        ComputeDtype,
        Doc(
            "The dtype of the operands of matrix products. float8 (NVIDIA) and int8 "
            "(TPU) are for the linear layers of attention and MLP."
        ),
    ] = ComputeDtype.auto
    high_precision_layers: Annotated[
        tuple[Number | End, ...],
        Doc(
            "The layers that do not use float8 or int8: first, last, or numbers from 0."
        ),
    ] = ()
    attention: Annotated[
        Attention,
        Doc("The kernel. auto: splash on TPU, cudnn on NVIDIA, xla elsewhere."),
    ] = Attention.auto
    layer_unroll: Annotated[
        Count | Literal[-1] | None,
        Doc(
            "The number of layers in an iteration of the scan. -1 unrolls all of them. "
            "null means -1 on GPUs for at most 16 layers whose weights are not sharded "
            "and that recompute nothing (train.remat=none), and otherwise 1."
        ),
    ] = None

    def part(self, section: type[Section]) -> Section:
        """Return the values of a part's own keys, given the dataclass that has them.

        A model that is built without a command line has their defaults
        (train/config/model.py).
        """
        return section()

    @property
    def vocab_rows(self) -> int:
        """Number of rows of the embedding and columns of the head, padding included.

        A large vocabulary is padded to a multiple of 128. This suits matrix units, and
        gives equal shards under tensor parallelism. Padding does not depend on the
        mesh, so that a checkpoint can be restored on any mesh.
        """
        assert self.vocab_size is not None, "`settle` sets it (train/resolve)"
        if self.vocab_size < _MIN_PADDED_VOCAB:
            return self.vocab_size
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads, K."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Dim of the queries and keys of a head, H."""
        if self.has_latent_attention:
            return self.nope_head_dim + self.rope_head_dim
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def value_size(self) -> int:
        """Dim of the values of a head."""
        return self.value_head_dim if self.has_latent_attention else self.head_size

    @property
    def delta_sizes(self) -> DeltaSizes:
        """The sizes of a gated delta net."""
        key_heads = self.delta_key_heads or self.num_heads
        key_dim = self.delta_key_dim or self.head_size
        return DeltaSizes(
            key_heads=key_heads,
            value_heads=self.delta_value_heads or key_heads,
            key_dim=key_dim,
            value_dim=self.delta_value_dim or key_dim,
        )

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
        """The number of layers with experts."""
        later_layers = self.num_layers - self.dense_layers
        return later_layers // self.experts_every if self.mlp is Mlp.moe else 0

    @property
    def layers_before_experts(self) -> int:
        """The number of layers before the first group that ends with experts."""
        return self.dense_layers if self.mlp is Mlp.moe else 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer. None means that a query sees all earlier keys."""
        reaches = self._repeat(self.layer_pattern or ("local",))
        return tuple(self.window if reach == "local" else None for reach in reaches)

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixer of each layer."""
        return tuple(self._repeat(self.mixer_pattern or (self.mixer,)))

    @property
    def has_latent_attention(self) -> bool:
        """Whether the attention of layers is latent attention."""
        return LATENT_ATTENTION in self.mixers

    def _repeat(self, pattern: Sequence[Any]) -> Iterator[Any]:
        return itertools.islice(itertools.cycle(pattern), self.num_layers)

    @property
    def high_precision_flags(self) -> tuple[bool, ...]:
        """Whether each layer is one of `high_precision_layers`."""
        ends = {"first": 0, "last": self.num_layers - 1}
        numbers = {ends.get(str(layer), layer) for layer in self.high_precision_layers}
        return tuple(layer in numbers for layer in range(self.num_layers))

    @property
    def rotary_dim(self) -> int:
        """The number of a head's dims that are rotated. This number is even."""
        if self.has_latent_attention:
            return self.rope_head_dim
        return int(self.head_size * self.rotary_fraction) // 2 * 2
