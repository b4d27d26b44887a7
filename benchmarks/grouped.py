"""Compare grouped products, of rows sorted by expert, with one product of all rows.

    python -m benchmarks.grouped [rows inputs outputs [ragged]]

Each product runs forward and backward in float32 on the default device. The products
alternate, and the results are medians. With the argument `ragged`, XLA's `ragged_dot`
is measured too.
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.data import alternate, timed
from model.choices import Grouped
from model.parts.experts.grouped import choose_grouped, grouped_product

_RUNS = 15


def forward_and_backward(product: Callable) -> Callable:
    """Return a jitted function (x, w, sizes, dy) -> (y, dx, dw) of a product."""

    def run(x, w, sizes, dy):
        y, back = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
        return y, *back(dy)

    return jax.jit(run)


def main(M: int, D: int, F: int, ragged: bool) -> None:
    """Print the milliseconds of products x[M, D] w[E, D, F], for 8 and 64 experts."""
    rng = np.random.default_rng(0)
    body = choose_grouped(jax.default_backend())
    products = {
        "dense": lambda x, w, sizes: x @ w[0],
        "grouped": lambda x, w, sizes: grouped_product(x, w, sizes, x.dtype, body),
    }
    if ragged:
        products["ragged"] = lambda x, w, sizes: grouped_product(
            x, w, sizes, x.dtype, Grouped.ragged
        )
    for E in (8, 64):
        sizes = np.bincount(rng.integers(E, size=M), minlength=E).astype(np.int32)
        x, w, dy = (
            jnp.asarray(rng.normal(size=shape), jnp.float32)
            for shape in ((M, D), (E, D, F), (M, F))
        )
        runs = {}
        for name, product in products.items():
            run = forward_and_backward(product)
            inputs = x, w[:1] if name == "dense" else w, sizes, dy
            runs[name] = timed(
                lambda run=run, inputs=inputs: jax.block_until_ready(run(*inputs))
            )
        took = alternate(runs, _RUNS)  # The warm-up round of `alternate` compiles.
        print(f"{E} experts, {M} rows of {D} by {F}, {body}:")
        for name, median in took.items():
            ratio = median / took["dense"]
            print(f"  {name:10} {1e3 * median:8.1f} ms  {ratio:.2f} of dense")


if __name__ == "__main__":
    numbers = [int(a) for a in sys.argv[1:4]]
    main(*(numbers or (8192, 256, 512)), ragged="ragged" in sys.argv)
