"""Named scopes, by which a plan or a profile recognises the parts of a program.

The name of each operation, and of the operations of its gradient, lists all enclosing
scopes. Compilers keep these names. A plan joins nested parts, such as `part.mlp` and
`part.up`, to `mlp.up`. Of nested `expected` or `computed` scopes, the innermost counts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax


def part_scope(name: str) -> AbstractContextManager:
    """Return the scope of a part of the model."""
    return jax.named_scope(f"part.{name}")


def expected_scope(rows: int, total: int) -> AbstractContextManager:
    """Return a scope for arrays that use `rows` of `total` rows on average."""
    return jax.named_scope(f"expected.{rows}.{total}")


def computed_scope(blocks: int, total: int) -> AbstractContextManager:
    """Return a scope for an attention kernel that computes `blocks` of `total`."""
    return jax.named_scope(f"computed.{blocks}.{total}")


def in_branch(run: Callable[..., Any], times: int, total: int) -> Callable[..., Any]:
    """Return a branch of `lax.cond` that calls `run` in a scope for plans.

    A plan reads from the scope that the branch is taken `times` of `total` times.
    """

    def branch(*arguments: Any) -> Any:
        with jax.named_scope(f"taken.{times}.{total}"):
            return run(*arguments)

    return branch
