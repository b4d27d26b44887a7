"""The named choices of a model's config."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, assert_never

from annotated_types import Ge, Gt, Le, Lt

_INT32_MAX = 2**31 - 1  # JAX takes whole numbers as int32
Count = Annotated[int, Ge(1), Le(_INT32_MAX)]
Number = Annotated[int, Ge(0), Le(_INT32_MAX)]
Size = Annotated[int, Ge(1), Le(2**24)]  # of one dim, so that products fit into int64
Depth = Annotated[int, Ge(1), Le(2**14)]  # Python lists every layer


class Norm(StrEnum):
    """Normalisation before each block and before the head."""

    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class NormPlacement(StrEnum):
    """What a layer normalises: what goes into attention and MLP, comes out, or both."""

    before = "before"
    after = "after"
    both = "both"


class NormSpan(StrEnum):
    """Over what queries and keys are normalised: each head, or all heads together."""

    head = "head"
    projection = "projection"


class Position(StrEnum):
    """How the model knows where a token stands."""

    learned = "learned"
    rotary = "rotary"


class Scaling(StrEnum):
    """How rotary positions are stretched: all pairs alike, or by how fast they turn."""

    none = "none"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


@dataclass(frozen=True)
class RopeScaling:
    """Rotary positions of a model that goes on to rows longer than it has learned."""

    kind: Scaling = Scaling.none  # the formula
    factor: Annotated[float, Ge(1)] = 1.0  # by which pairs are slowed down
    # Rows of the earlier training (llama3, yarn).
    original_length: Count | None = None
    # Pairs that turn less often in such a row are slowed by the whole factor: others'
    # low_freq_factor (llama3), beta_slow (yarn).
    slow_turns: Annotated[float, Gt(0)] = 1.0
    # Those that turn more often are kept: high_freq_factor (llama3; null: 4), beta_fast
    # (yarn; null: 32).
    fast_turns: Annotated[float, Gt(0)] | None = None
    # Times cosines and sines (yarn); null: 0.1 ln factor + 1.
    attention_factor: Annotated[float, Gt(0)] | None = None
    truncate: bool = True  # yarn: the bounds between pairs are whole numbers

    @property
    def yarn_factor(self) -> float:
        """By what yarn multiplies cosines and sines."""
        return self.attention_factor or 0.1 * math.log(self.factor) + 1

    @property
    def most_turns(self) -> float:
        """How often those pairs turn that are just kept."""
        match self.kind:
            case Scaling.yarn:
                usual = 32.0
            case Scaling.llama3 | Scaling.none | Scaling.linear:
                usual = 4.0
            case _:
                assert_never(self.kind)
        return self.fast_turns or usual


Rate = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class Dropout:
    """The part of what passes that training leaves out at random; 0: nothing."""

    embedding: Rate = 0.0  # of what enters the first layer
    attention: Rate = 0.0  # of the weights of keys; needs model.attention=xla
    residual: Rate = 0.0  # of what attention and MLP add to the residual stream


class Activation(StrEnum):
    """Non-linearity of the MLP; those on -glu add a gate, `relu2` is relu².

    `clamped_swiglu` is (up + 1) gate sigmoid(alpha gate), both held within a limit.
    """

    gelu = "gelu"
    swiglu = "swiglu"
    clamped_swiglu = "clamped_swiglu"
    geglu = "geglu"
    relu2 = "relu2"

    @property
    def gated(self) -> bool:
        """Whether it multiplies the MLP's values by a gate."""
        match self:
            case Activation.swiglu | Activation.clamped_swiglu | Activation.geglu:
                return True
            case Activation.gelu | Activation.relu2:
                return False
            case _:
                assert_never(self)


class Init(StrEnum):
    """Initial standard deviations of the matrices.

    `gpt2`: 0.02, and 0.02/sqrt(2 num_layers) into the residual stream.
    `scaled`: 1/sqrt(fan_in), likewise divided by sqrt(2 num_layers).
    `zero`: 1/sqrt(fan_in), but zero into the residual stream and an untied head.
    """

    gpt2 = "gpt2"
    scaled = "scaled"
    zero = "zero"


class Dtype(StrEnum):
    """`auto` is bfloat16, but float32 on a CPU that is no faster in bfloat16."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class ComputeDtype(StrEnum):
    """Dtype of products' operands; `auto` as in `Dtype`.

    `float8` and `int8` are those of linear layers inside of the network; what else
    multiplies (embedding, head, router, attention) is as with `auto`.
    """

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float8 = "float8"
    int8 = "int8"


class Attention(StrEnum):
    """Attention kernel; `auto` is splash on TPU, cudnn on NVIDIA, xla elsewhere.

    `cudnn_packed` is cudnn without a mask of packed documents, from Hopper on.
    """

    auto = "auto"
    xla = "xla"
    cudnn = "cudnn"
    cudnn_packed = "cudnn_packed"
    splash = "splash"

    @property
    def is_cudnn(self) -> bool:
        """Whether it is NVIDIA's."""
        return self in (Attention.cudnn, Attention.cudnn_packed)


class ContextAttention(StrEnum):
    """How devices that share a row attend to each other's keys.

    `ring`: keys and values travel from device to device. `ulysses`: each device has the
    whole row of some heads. `all_gather`: each has the keys and values of all. `auto`
    takes the first of these that can serve.
    """

    auto = "auto"
    ring = "ring"
    ulysses = "ulysses"
    all_gather = "all_gather"


class ExpertExchange(StrEnum):
    """How tokens reach experts on other devices (model/experts/experts.py).

    `all_gather`: each device gathers the tokens of all. `ragged`: only rows travel that
    an expert is to have. `auto`: on TPUs what sends less, else all_gather.
    """

    auto = "auto"
    all_gather = "all_gather"
    ragged = "ragged"


class Grouped(StrEnum):
    """Body of products of rows grouped by expert; each platform has its own.

    `ragged` is XLA's, to trace and to compare: it is slow (model/experts/grouped.py).
    """

    ragged = "ragged"
    scan = "scan"
    megablox = "megablox"
    triton = "triton"


class Mlp(StrEnum):
    """`moe`: each token takes a few of many experts, each an MLP."""

    dense = "dense"
    moe = "moe"


class Scores(StrEnum):
    """How logits become the scores of experts: of all together, or one by one."""

    softmax = "softmax"
    sigmoid = "sigmoid"
