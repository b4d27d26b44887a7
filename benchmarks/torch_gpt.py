"""The PyTorch contender: a GPT-2 style model and a fast training step.

The model has LayerNorm without bias, tanh GELU, learned positions, a tied head and no
dropout. A step is zero_grad, forward, loss, backward, clipping by the global norm and
AdamW. All variants of one shape start from the same weights, so that their losses can
be compared. The contender loads no data, saves nothing and has no learning-rate
schedule.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


def written_out_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention of [batch, head, time, head dim], with stored scores."""
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
    future = torch.full(scores.shape[-2:], -torch.inf, device=q.device).triu(1)
    return torch.softmax(scores.float() + future, -1).to(v.dtype) @ v


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention by PyTorch's kernel, with the same shapes."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


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


class GPT(nn.Module):
    """A model that maps tokens and targets to the mean cross-entropy."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        embed_dim: int,
        context: int,
        vocab_size: int,
        attention: Attention,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, embed_dim)
        self.positions = nn.Parameter(torch.empty(context, embed_dim))
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, attention) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embed_dim, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(
                    ("attention_out.weight", "mlp_out.weight")
                )
                std = 0.02 / (2 * num_layers) ** 0.5 if into_residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class TorchWorker:
    """A model that trains on a fixed set of batches (`benchmarks.step_worker.Worker`).

    Args:
        batches: token ids [number of batches, batch, context + 1], used in turn.
        compiled: whether to use torch.compile; otherwise the model runs eagerly.
        bfloat16: whether to autocast products to bfloat16. Otherwise they are float32
            (TF32 on a GPU).
        written_out: whether attention is products and a softmax, which is faster than
            PyTorch's kernel on a CPU for short rows.
        device: "cpu" or "cuda".
        num_threads: the number of CPU threads.
        shape: the arguments of `GPT`.
    """

    def __init__(
        self,
        batches: np.ndarray,
        *,
        compiled: bool,
        bfloat16: bool,
        written_out: bool,
        device: str,
        num_threads: int,
        **shape: int,
    ) -> None:
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)
        self.device = device
        self.bfloat16 = bfloat16
        self.steps = 0
        ids = torch.from_numpy(batches).long().to(device)
        self.inputs = [batch[:, :-1].contiguous() for batch in ids]
        self.targets = [batch[:, 1:].contiguous() for batch in ids]
        attention = written_out_attention if written_out else fused_attention
        model = GPT(**shape, attention=attention).to(device)
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
