"""The steps of evaluation: the loss of a batch, or that of each of its rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from data.batch import Batch
from model.execution import Execution
from model.gpt import GPT, bind
from model.params import param_infos
from train.core.loss.loss import loss_sum, row_sums
from train.core.loss.token_loss import CrossEntropy
from train.core.recipe import Recipe
from train.core.rows import REPLICATED, run_per_device, split, sum_over_rows


def make_eval_step(
    model: GPT, execution: Execution, recipe: Recipe, num_tokens: int | None = None
) -> Callable[[Any, Batch], tuple[Float[Array, ""], Int[Array, ""]]]:
    """Return `eval_step(params, batch) -> (sum of nats, number of targets)`.

    The step uses the microbatches of training, so that it needs no more memory.
    """
    microbatches = recipe.accumulation_steps

    def eval_step(params: Any, batch: Batch):
        def sum_microbatch(rows: Batch) -> tuple[Float[Array, ""], Int[Array, ""]]:
            bound = bind(model, params)
            chunk = recipe.loss_chunk_tokens
            sums = loss_sum(
                bound, rows, execution, CrossEntropy(), chunk, num_tokens=num_tokens
            )
            return sums.nats[0], jnp.sum(rows.targets >= 0)

        def add(total: Any, rows: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, sum_microbatch(rows)), None

        if microbatches == 1:
            return sum_over_rows(sum_microbatch(batch), execution.placement)
        zeros = jnp.float32(0), jnp.int32(0)
        with jax.named_scope("microbatches"):
            total, _ = jax.lax.scan(add, zeros, split(batch, microbatches))
        return sum_over_rows(total, execution.placement)

    return run_per_device(
        eval_step, execution, param_infos(model), lambda specs: REPLICATED
    )


def make_score_step(
    model: GPT, execution: Execution, recipe: Recipe, num_tokens: int | None
) -> Callable[[Any, Batch], tuple[Float[Array, "B"], Float[Array, "B"]]]:
    """Return `score_step(params, batch) -> (nats, misses)` of each row (`row_sums`)."""

    def score_step(params: Any, batch: Batch):
        chunk = recipe.loss_chunk_tokens
        sums = row_sums(bind(model, params), batch, execution, num_tokens, chunk)
        return jax.lax.psum(sums, execution.placement.sequence_axes)

    row_spec = execution.placement.rules.spec("batch")
    infos = param_infos(model)
    return run_per_device(score_step, execution, infos, lambda specs: row_spec)
