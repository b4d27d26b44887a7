"""The PyTorch contender: a GPT-2 or Llama style model and a fast training step.

GPT-2's model has LayerNorm without bias, tanh GELU, learned positions, a tied head and
no dropout. Llama's has RMSNorm, SwiGLU, rotary positions, fewer key and value heads
than query heads, and a head of its own. A step is zero_grad, forward, loss, backward,
clipping by the global norm and AdamW. All variants of one shape start from the same
weights, so that their losses can be compared. The contender loads no data, saves
nothing and has no learning-rate schedule.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]

from benchmarks.step_worker import Shape

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
ROPE_THETA = 500000.0
NORM_EPSILON = 1e-5


def written_out_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of [batch, head, time, head dim], with stored scores."""
    if k.shape[1] < q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
    future = torch.full(scores.shape[-2:], -torch.inf, device=q.device).triu(1)
    return torch.softmax(scores.float() + future, -1).to(v.dtype) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention by PyTorch's kernel, with the same shapes."""
    grouped = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of [batch, head, time, D], in float32."""
    first, second = x.float().chunk(2, -1)
    pairs = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(pairs, -1).to(x.dtype)


class Block(nn.Module):
    """A layer: attention and an MLP, each after a LayerNorm."""

    def __init__(self, embed_dim: int, num_heads: int, attention: Attention) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = attention
        self.attention_norm = nn.LayerNorm(embed_dim, bias=False)
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.attention_out = nn.Linear(embed_dim, embed_dim, bias=False)
        self.mlp_norm = nn.LayerNorm(embed_dim, bias=False)
        self.mlp_in = nn.Linear(embed_dim, 4 * embed_dim, bias=False)
        self.mlp_out = nn.Linear(4 * embed_dim, embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time_dim, _ = x.shape
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.view(batch, time_dim, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = self.attention(q, k, v).transpose(1, 2).reshape(batch, time_dim, -1)
        x = x + self.attention_out(mixed)
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        return x + self.mlp_out(hidden)


class LlamaBlock(nn.Module):
    """A layer of Llama: attention and an MLP, each after an RMSNorm."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        assert shape.num_kv_heads is not None
        assert shape.mlp_dim is not None
        embed_dim = shape.embed_dim
        self.head_dim = head_dim = embed_dim // shape.num_heads
        self.heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self.attention = attention
        self.attention_norm = nn.RMSNorm(embed_dim, eps=NORM_EPSILON)
        self.qkv = nn.Linear(embed_dim, sum(self.heads) * head_dim, bias=False)
        self.attention_out = nn.Linear(embed_dim, embed_dim, bias=False)
        self.mlp_norm = nn.RMSNorm(embed_dim, eps=NORM_EPSILON)
        self.mlp_in = nn.Linear(embed_dim, 2 * shape.mlp_dim, bias=False)
        self.mlp_out = nn.Linear(shape.mlp_dim, embed_dim, bias=False)
        frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(shape.context), frequencies)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        batch, time_dim, _ = x.shape
        qkv = self.qkv(self.attention_norm(x))
        qkv = qkv.view(batch, time_dim, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)
        q = rotate(q, self.cos, self.sin)
        k = rotate(k, self.cos, self.sin)
        mixed = self.attention(q, k, v).transpose(1, 2).reshape(batch, time_dim, -1)
        x = x + self.attention_out(mixed)
        gate, hidden = self.mlp_in(self.mlp_norm(x)).chunk(2, -1)
        return x + self.mlp_out(F.silu(gate) * hidden)


class GPT(nn.Module):
    """A model that maps tokens and targets to the mean cross-entropy."""

    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        num_layers = shape.num_layers
        embed_dim = shape.embed_dim
        self.tokens = nn.Embedding(shape.vocab_size, embed_dim)
        if shape.num_kv_heads:
            self.positions = None
            blocks = [LlamaBlock(shape, attention) for _ in range(num_layers)]
            self.norm = nn.RMSNorm(embed_dim, eps=NORM_EPSILON)
            self.head = nn.Linear(embed_dim, shape.vocab_size, bias=False)
        else:
            self.positions = nn.Parameter(torch.empty(shape.context, embed_dim))
            blocks = [
                Block(embed_dim, shape.num_heads, attention) for _ in range(num_layers)
            ]
            self.norm = nn.LayerNorm(embed_dim, bias=False)
            self.head = self.tokens
        self.blocks = nn.ModuleList(blocks)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(
                    ("attention_out.weight", "mlp_out.weight")
                )
                std = 0.02 / (2 * num_layers) ** 0.5 if into_residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.head.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class TorchWorker:
    """A model that trains on a fixed set of batches (`benchmarks.step_worker.Worker`).

    Args:
        shape: the sizes of the model and of its batches, which are used in turn.
        compiled: whether to use torch.compile; otherwise the model runs eagerly.
        bfloat16: whether to autocast products to bfloat16. Otherwise they are float32
            (TF32 on a GPU).
        written_out: whether attention is products and a softmax, which is faster than
            PyTorch's kernel on a CPU for short rows.
        device: "cpu" or "cuda".
        num_threads: the number of CPU threads.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        compiled: bool,
        bfloat16: bool,
        written_out: bool,
        device: str,
        num_threads: int,
    ) -> None:
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)
        self.device = device
        self.bfloat16 = bfloat16
        self.steps = 0
        ids = torch.from_numpy(shape.batches()).long().to(device)
        self.inputs = [batch[:, :-1].contiguous() for batch in ids]
        self.targets = [batch[:, 1:].contiguous() for batch in ids]
        attention = written_out_attention if written_out else fused_attention
        model = GPT(shape, attention).to(device)
        self.parameters = list(model.parameters())
        matrices = [p for p in self.parameters if p.dim() == 2]
        vectors = [p for p in self.parameters if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=LEARNING_RATE,
            betas=BETAS,
            fused=True,
        )
        self.model: Any = torch.compile(model, dynamic=False) if compiled else model

    def step(self) -> Tensor:
        """Make one update; return the loss on the device, without waiting for it."""
        index = self.steps % len(self.inputs)
        self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        precision = (
            torch.autocast(self.device, dtype=torch.bfloat16)
            if self.bfloat16
            else contextlib.nullcontext()
        )
        with precision:
            loss = self.model(self.inputs[index], self.targets[index])
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM, foreach=True)
        self.optimizer.step()
        return loss.detach()

    def step_block(self, num_steps: int) -> tuple[float, float]:
        """Make `num_steps` updates; return their seconds and the last loss."""
        start = time.perf_counter()
        for _ in range(num_steps):
            loss = self.step()
        value = loss.item()  # Waits for the device.
        return time.perf_counter() - start, value

    def kernels(self) -> dict[str, int]:
        """Return {}: PyTorch chooses its kernels only while it runs."""
        return {}

    def device_peak_bytes(self) -> int | None:
        """Return the peak GPU memory allocated so far; None on the CPU."""
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else None


def square(matrix: np.ndarray) -> Callable[[], Tensor]:
    """Return a function that multiplies a matrix by itself on the CPU."""
    tensor = torch.from_numpy(matrix)
    return lambda: tensor @ tensor
