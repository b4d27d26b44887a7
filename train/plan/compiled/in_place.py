"""Which results of a compiled program are written where an argument was.

A donated argument that nothing needs any more gives its memory to a result of the same
shape, dtype and layout; the first line of the program says which.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_ALIAS = re.compile(r"\{(\d*)\}: \(\d+, \{[\d, ]*\}, \w+-alias\)")


class InPlace(NamedTuple):
    """updated: arrays with a place of an argument's; others: those without."""

    updated: list[str]
    others: list[str]


def updated_in_place(text: str, names: Sequence[str]) -> InPlace:
    """Sort a program's first results by whether they are written in place.

    `text` is that of the optimized module; `names` are in the order of the results.
    """
    header = text[: text.find("\n")]
    aliased = {int(number or 0) for number in _ALIAS.findall(header)}
    updated = [name for i, name in enumerate(names) if i in aliased]
    return InPlace(updated, [name for i, name in enumerate(names) if i not in aliased])
