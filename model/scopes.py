"""Named scopes, by which a plan or a profile recognises the parts of a program.

The name of each operation, and of the operations of its gradient, lists all enclosing
scopes. Compilers keep these names. A plan joins nested parts, such as `part.mlp` and
`part.up`, to `mlp.up`.
"""

from contextlib import AbstractContextManager

import jax


def part_scope(name: str) -> AbstractContextManager:
    """Return the scope of a part of the model."""
    return jax.named_scope(f"part.{name}")
