"""List parameters in the order in which the forward pass uses them."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from model.params import named
from train.eval_step import make_eval_step
from train.program import Program


def forward_order(program: Program) -> list[str]:
    """Return the names of a program's parameters, in the order of their first use.

    The order is read from the traced forward pass. It is exact on one device.
    """
    config, params = program.config, program.state.params
    step = make_eval_step(
        program.model, program.execution, config.train, program.num_tokens
    )
    jaxpr = jax.make_jaxpr(step)(params, program.batch).jaxpr
    names, uses = [name for name, _ in named(params)], list[str]()
    _find_uses(jaxpr, dict(zip(jaxpr.invars, names, strict=False)), uses)
    return [*dict.fromkeys((*uses, *names))]


def _find_uses(jaxpr: Any, names: dict[Any, str], uses: list[str]) -> None:
    """Append the names of the variables that operations use, in program order.

    `names` gets the variables that are only another form of a named variable, which
    was reshaped, for example, or rounded.
    """
    for equation in jaxpr.eqns:
        operands = [None if hasattr(x, "val") else x for x in equation.invars]
        if not (used := [names[x] for x in operands if x in names]):
            continue
        inner = [getattr(x, "jaxpr", x) for x in _flat(equation.params.values())]
        if inner := [x for x in inner if hasattr(x, "eqns")]:
            for body in inner:
                # A branch lacks the first operand, which selects it.
                outer = operands[len(operands) - len(body.invars) :]
                pairs = zip(body.invars, outer, strict=False)
                inner_names = {x: names[y] for x, y in pairs if y in names}
                _find_uses(body, inner_names, uses)
                for result, x in zip(equation.outvars, body.outvars, strict=False):
                    if not hasattr(x, "val") and x in inner_names:
                        names[result] = inner_names[x]
        elif len(operands) == 1:
            names[equation.outvars[0]] = used[0]
        else:
            uses += used


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and the members of the tuples among them."""
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)
