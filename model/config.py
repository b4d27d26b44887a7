"""What a GPT is: its shape and its choices, nothing about how it is run."""

from dataclasses import dataclass
from enum import StrEnum

VOCAB_MULTIPLE = 128  # large vocabularies are padded to it
_PADDED_FROM = 1024

# What a dim of a parameter or an activation is; rule tables map them to mesh axes.
LOGICAL_AXES = (
    "batch",
    "seq",
    "vocab",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp",
    "experts",
    "layers",
)


class Norm(StrEnum):
    """Normalisation before each block and before the head."""

    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class Position(StrEnum):
    """How the model knows where a token stands."""

    learned = "learned"
    rotary = "rotary"


class Activation(StrEnum):
    """Non-linearity of the MLP; `swiglu` adds a gate, `relu2` is relu squared."""

    gelu = "gelu"
    swiglu = "swiglu"
    relu2 = "relu2"


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
    """`auto` is bfloat16, but float32 on a CPU without bfloat16 instructions."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Attention(StrEnum):
    """Attention kernel; `auto` is splash on TPU, cudnn on NVIDIA, xla elsewhere."""

    auto = "auto"
    xla = "xla"
    cudnn = "cudnn"
    splash = "splash"


@dataclass(frozen=True)
class ModelConfig:
    """Shape and choices of a GPT. Sizes are of the whole model, not of a device."""

    name: str = "gpt"
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None  # fewer than num_heads: grouped-query attention
    embed_dim: int = 128
    head_dim: int | None = None  # null: embed_dim / num_heads
    mlp_dim: int | None = None  # null: 4 embed_dim
    vocab_size: int | None = None  # null: the tokenizer's, up to a multiple of 128
    max_sequence_length: int | None = None  # learned positions; null: the data's

    norm: Norm = Norm.rmsnorm
    norm_epsilon: float = 1e-5
    position: Position = Position.rotary
    rope_theta: float = 10000.0
    rotary_fraction: float = 1.0  # the part of each head that is rotated
    activation: Activation = Activation.swiglu
    qk_norm: bool = False
    tied_head: bool = False
    bias: bool = False  # in linear layers and LayerNorm
    logit_soft_cap: float | None = None  # c tanh(logits / c)
    init: Init = Init.scaled
    embedding_std: float = 0.02

    param_dtype: Dtype = Dtype.float32
    compute_dtype: Dtype = Dtype.auto  # of the operands of matrix products
    attention: Attention = Attention.auto
    layer_unroll: int = 1  # layers per iteration of the scan; -1: all, no loop

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
    def mlp_size(self) -> int:
        """Hidden dim of the MLP, F."""
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dims rotary positions rotate; even."""
        return int(self.head_size * self.rotary_fraction) // 2 * 2

    def mistakes(self) -> list[tuple[str, object, str]]:
        """List what is wrong as (field, value, rule and remedy)."""
        found: list[tuple[str, object, str]] = []

        def check(ok: bool, field: str, rule: str) -> None:
            if not ok:
                found.append((field, getattr(self, field), rule))

        for field in ("num_layers", "num_heads", "embed_dim"):
            check(getattr(self, field) >= 1, field, "must be at least 1")
        for field in ("num_kv_heads", "head_dim", "mlp_dim", "vocab_size"):
            value = getattr(self, field)
            check(value is None or value >= 1, field, "must be at least 1, or null")
        if found:
            return found
        check(
            self.head_dim is not None or self.embed_dim % self.num_heads == 0,
            "embed_dim",
            f"must be divisible by model.num_heads={self.num_heads}; "
            "change one of them or set model.head_dim",
        )
        check(
            self.num_heads % self.kv_heads == 0,
            "num_kv_heads",
            f"must divide model.num_heads={self.num_heads}; "
            "each key/value head serves the same number of query heads",
        )
        check(
            0 < self.rotary_fraction <= 1,
            "rotary_fraction",
            "must lie in (0, 1]; 1 rotates the whole head",
        )
        check(
            self.position is not Position.rotary or self.rotary_dim >= 2,
            "rotary_fraction",
            f"leaves {self.rotary_dim} of {self.head_size} head dims to rotate; "
            "raise it, or choose model.position=learned",
        )
        check(
            self.logit_soft_cap is None or self.logit_soft_cap > 0,
            "logit_soft_cap",
            "must be positive, or null for no cap",
        )
        check(
            self.layer_unroll == -1 or self.layer_unroll >= 1,
            "layer_unroll",
            "must be at least 1, or -1 for all layers",
        )
        check(
            self.param_dtype is not Dtype.auto,
            "param_dtype",
            "must be float32 or bfloat16",
        )
        check(self.embedding_std > 0, "embedding_std", "must be positive")
        check(self.norm_epsilon > 0, "norm_epsilon", "must be positive")
        return found
