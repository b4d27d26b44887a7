"""The named choices of a model's config."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc

_INT32_MAX = 2**31 - 1  # JAX converts a Python int to int32.
Count = Annotated[int, Ge(1), Le(_INT32_MAX)]
Number = Annotated[int, Ge(0), Le(_INT32_MAX)]
Size = Annotated[int, Ge(1), Le(2**24)]  # The product of two sizes fits into int64.
Depth = Annotated[int, Ge(1), Le(2**14)]  # Python tuples have an entry for each layer.
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Rate = Annotated[float, Ge(0), Lt(1)]

# A query of a local layer sees the last `model.window` keys, its own included. A query
# of a global layer sees all earlier keys.
Reach = Literal["local", "global"]
End = Literal["first", "last"]  # names for the first and the last layer

# The results of a layer that its backward pass saves or recomputes. `attention` is the
# kernel's output and its log-sum-exp. If both are saved, the backward pass does not run
# the kernel's forward pass again (but `xla` still recomputes the attention weights).
# All others are results of products with a weight. The result of mlp_down is left out,
# because only a norm of the MLP's output (`norm_placement`) needs it in its gradient.
# `latent` are the compressed queries, keys and values of latent attention.
Intermediate = Literal[
    "query",
    "key",
    "value",
    "latent",
    "attention",
    "attention_output",
    "mlp_gate",
    "mlp_up",
]
INTERMEDIATES: tuple[Intermediate, ...] = get_args(Intermediate)

# The arrays that can be offloaded to host memory: a layer's input (`residual`) and its
# results.
OffloadName = Literal["residual", Intermediate]


class Norm(StrEnum):
    """The kind of the norms in each layer and before the head."""

    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class NormPlacement(StrEnum):
    """Whether norms come before attention and MLP, after them, or both."""

    before = "before"
    after = "after"
    both = "both"


class NormSpan(StrEnum):
    """Whether queries and keys are normalised per head, or over all heads together."""

    head = "head"
    projection = "projection"


class Position(StrEnum):
    """How the model knows the position of a token."""

    learned = "learned"
    rotary = "rotary"


class Scaling(StrEnum):
    """How the rotation of pairs of head dims is slowed down (model/rope.py).

    `linear` slows all pairs equally. `llama3` and `yarn` do not change fast pairs.
    """

    none = "none"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


@dataclass(frozen=True)
class RopeScaling:
    """Rotary positions for rows longer than those that weights were trained with."""

    kind: Annotated[Scaling, Doc("The formula.")] = Scaling.none
    factor: Annotated[
        float, Ge(1), Doc("The factor by which pairs of dims are slowed down.")
    ] = 1.0
    original_length: Annotated[
        Count | None, Doc("The row length of the earlier training (llama3, yarn).")
    ] = None
    slow_turns: Annotated[
        Positive,
        Doc(
            "Pairs that turn less often in such a row are slowed by the whole factor. "
            "Elsewhere it is called low_freq_factor (llama3) or beta_slow (yarn)."
        ),
    ] = 1.0
    fast_turns: Annotated[
        Positive | None,
        Doc(
            "Pairs that turn more often are not slowed. Elsewhere it is called "
            "high_freq_factor (llama3; null: 4) or beta_fast (yarn; null: 32)."
        ),
    ] = None
    attention_factor: Annotated[
        Positive | None,
        Doc(
            "yarn multiplies cosines and sines by this. null: 0.1 ln(factor) + 1, or "
            "m(mscale) / m(mscale_all_dim) if both are set, where m(a) is "
            "0.1 a ln(factor) + 1."
        ),
    ] = None
    mscale: Annotated[NotNegative, Doc("See attention_factor. 0 is not set.")] = 0.0
    mscale_all_dim: Annotated[
        NotNegative,
        Doc(
            "latent_attention multiplies its scores by m(mscale_all_dim)². See "
            "attention_factor. 0 is not set."
        ),
    ] = 0.0
    truncate: Annotated[
        bool, Doc("yarn rounds the bounds between pairs to whole numbers.")
    ] = True

    @property
    def yarn_factor(self) -> float:
        """The factor by which yarn multiplies cosines and sines."""
        if self.attention_factor or not (self.mscale and self.mscale_all_dim):
            return self.attention_factor or self._magnitude(1.0)
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """The factor by which latent attention multiplies its scores."""
        if self.kind is Scaling.none:
            return 1.0
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1

    @property
    def fast_turns_or_default(self) -> float:
        """`fast_turns`, or the default of this kind if `fast_turns` is null."""
        return self.fast_turns or (32.0 if self.kind is Scaling.yarn else 4.0)


@dataclass(frozen=True)
class Dropout:
    """The fraction of values that training sets to zero at random."""

    embedding: Annotated[Rate, Doc("The rate for the input of the first layer.")] = 0.0
    attention: Annotated[
        Rate, Doc("The rate for attention weights. It needs model.attention=xla.")
    ] = 0.0
    residual: Annotated[
        Rate, Doc("The rate for what attention and MLP add to the residual stream.")
    ] = 0.0


class Activation(StrEnum):
    """The non-linearity of the MLP. Names that end in glu add a gate; `relu2` is relu².

    `clamped_swiglu` is (up + 1) gate sigmoid(swiglu_alpha gate). Before that, up is
    clamped to ±swiglu_limit, and gate is clamped to at most swiglu_limit.
    """

    gelu = "gelu"
    swiglu = "swiglu"
    clamped_swiglu = "clamped_swiglu"
    geglu = "geglu"
    relu2 = "relu2"

    @property
    def gated(self) -> bool:
        """Whether the MLP's values are multiplied by a gate."""
        return self.endswith("glu")


class TokenShift(StrEnum):
    """The inputs that take channels from the previous position.

    The shift is in model/parts/token_shift.py.
    `attention` stands for all mixers, and `mlp` includes experts and their router.
    """

    none = "none"
    mlp = "mlp"
    attention = "attention"
    both = "both"

    @property
    def in_attention(self) -> bool:
        """Whether the input of the mixer is shifted."""
        return self in (TokenShift.attention, TokenShift.both)

    @property
    def in_mlp(self) -> bool:
        """Whether the input of the MLP or the experts is shifted."""
        return self in (TokenShift.mlp, TokenShift.both)


class Init(StrEnum):
    """Initial standard deviations of the matrices.

    Matrices that write into the residual stream (output, down) have a smaller one.

    `gpt2`: 0.02; for these matrices 0.02/sqrt(2 num_layers).
    `scaled`: 1/sqrt(fan_in); for these matrices also divided by sqrt(2 num_layers).
    `zero`: 1/sqrt(fan_in); for these matrices and an untied head zero.
    """

    gpt2 = "gpt2"
    scaled = "scaled"
    zero = "zero"


class Dtype(StrEnum):
    """A dtype. `auto` is bfloat16, or float32 on CPUs without fast bfloat16."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class ComputeDtype(StrEnum):
    """The dtype of the operands of matrix products. `Dtype` explains `auto`.

    `float8` and `int8` apply to the linear layers of attention and MLP, and `float8`
    also to experts, except on TPUs. Head and attention kernel then use the dtype of
    `auto`. The router always computes in float32.
    """

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float8 = "float8"
    int8 = "int8"


class Attention(StrEnum):
    """The attention kernel; `auto` is splash on TPU, cudnn on NVIDIA, xla elsewhere.

    `cudnn_packed` skips pairs of positions in different documents. It needs Hopper or
    a later GPU.
    """

    auto = "auto"
    xla = "xla"
    cudnn = "cudnn"
    cudnn_packed = "cudnn_packed"
    splash = "splash"

    @property
    def is_cudnn(self) -> bool:
        """Whether cuDNN provides the kernel."""
        return self in (Attention.cudnn, Attention.cudnn_packed)


class ContextAttention(StrEnum):
    """How devices that share a row attend to each other's keys.

    `ring`: keys and values travel from device to device. `ulysses`: each device gets
    whole rows of some heads. `all_gather`: each device gathers all keys and values.
    `auto` gathers with splash if this needs little memory. Otherwise it selects the
    first of these three that can run.
    """

    auto = "auto"
    ring = "ring"
    ulysses = "ulysses"
    all_gather = "all_gather"


class ExpertExchange(StrEnum):
    """How tokens reach experts on other devices (model/parts/experts/experts.py).

    `all_gather`: each device gathers all tokens. `ragged`: only the rows that an expert
    needs are sent. `all_to_all`: those rows are sent in pieces of equal size.
    `auto`: ragged on TPUs and all_to_all on GPUs if they send fewer rows; otherwise
    all_gather.
    """

    auto = "auto"
    all_gather = "all_gather"
    ragged = "ragged"
    all_to_all = "all_to_all"


class Grouped(StrEnum):
    """The kernel that multiplies rows, grouped by expert, with their expert's matrix.

    `ragged` is XLA's own slow product, which only plans and tests use.
    model/parts/experts/grouped.py describes the kernels.
    """

    ragged = "ragged"
    scan = "scan"
    megablox = "megablox"
    triton = "triton"


class Mlp(StrEnum):
    """The kind of MLP. `moe`: each token uses a few of many experts, which are MLPs."""

    dense = "dense"
    moe = "moe"


class Scores(StrEnum):
    """The router's scores: a softmax over all experts, or a sigmoid for each expert."""

    softmax = "softmax"
    sigmoid = "sigmoid"
