"""Names of the model's parts in traced programs.

A scope `part.mlp.up` stands in the name of each operation made inside of it, and of
its gradient's, and compilers keep those names: by them a plan tells what a product or a
collective is for, and a profile shows it. Of nested parts the innermost counts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax


def part(name: str) -> AbstractContextManager:
    """Name the part of the model that what is traced inside belongs to."""
    return jax.named_scope(f"part.{name}")


def expected(rows: int, of: int) -> AbstractContextManager:
    """Say how many rows of an array are in use where experts get as much as another."""
    return jax.named_scope(f"expected.{rows}.{of}")


def computed(blocks: int, of: int) -> AbstractContextManager:
    """Say how many blocks of scores an attention kernel computes, of how many."""
    return jax.named_scope(f"computed.{blocks}.{of}")


def in_branch(run: Callable[..., Any], times: int, of: int) -> Callable[..., Any]:
    """Say of a function that is a branch how often it is taken."""

    def branch(*arguments: Any) -> Any:
        with jax.named_scope(f"taken.{times}.{of}"):
            return run(*arguments)

    return branch
