"""Names of the model's parts in traced programs.

A scope `part.mlp.up` stands in the name of each operation made inside of it, and of
its gradient's, and compilers keep those names: by them a plan tells what a product or a
collective is for, and a profile shows it. Of nested parts the innermost counts.
"""

from contextlib import AbstractContextManager

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


def taken(times: int, of: int) -> AbstractContextManager:
    """Say of a branch how often it is taken."""
    return jax.named_scope(f"taken.{times}.{of}")
