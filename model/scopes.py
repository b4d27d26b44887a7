"""Named scopes, by which a plan or a profile recognises the parts of a program.

A scope such as `part.mlp.up` is in the name of each operation inside of it, and of the
operations of its gradient. Compilers keep these names. The innermost scope counts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax


def part_scope(name: str) -> AbstractContextManager:
    """Return the scope of a part of the model."""
    return jax.named_scope(f"part.{name}")


def expected_scope(rows: int, total: int) -> AbstractContextManager:
    """Return a scope for arrays of `total` rows; `rows` are in use on average."""
    return jax.named_scope(f"expected.{rows}.{total}")


def computed_scope(blocks: int, total: int) -> AbstractContextManager:
    """Return a scope for an attention kernel that computes `blocks` of `total`."""
    return jax.named_scope(f"computed.{blocks}.{total}")


def in_branch(run: Callable[..., Any], times: int, total: int) -> Callable[..., Any]:
    """Return a branch that runs `run`, in a scope that says how often it is taken."""

    def branch(*arguments: Any) -> Any:
        with jax.named_scope(f"taken.{times}.{total}"):
            return run(*arguments)

    return branch
