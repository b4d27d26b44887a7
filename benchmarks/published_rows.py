"""Read tables of published training runs.

Each published_*.json in this folder is one table. Its `rows` have the fields of `Row`,
except that `chip` is a name from the table's `chips`, which state their `rates`.
"""

import json
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from train.hardware.achievable import AttentionRates, GroupedRates

TABLES = {
    name: Path(__file__).with_name(f"published_{name}.json")
    for name in ("tpu", "llama", "experts", "gpu", "b200")
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published run, and the closest keys of `python -m train.plan`.

    flops, tokens: the published speed: model FLOPs or tokens per second and chip.
    date: year and month of the published speed, if the source states them.
    differs: what the keys cannot express.
    kept: pairs of a number of slices, and the speed per chip relative to one slice.
    chip: rates of the run that differ from those in train/hardware/chips.py.
    use: "settled on" if a constant of train/hardware/achievable.py is fitted to this
        row, "judged by" if the row validates the constants.
    note: the figures of the source, if the speed is computed from them, or a remark.
    """

    name: str
    source: str
    overrides: tuple[str, ...]
    flops: float | None = None
    tokens: float | None = None
    date: str = ""
    differs: str
    kept: tuple[tuple[int, float], ...] = ()
    chip: dict[str, Any] = field(default_factory=dict)
    use: str
    note: str = ""


def read_rows(table: Path) -> tuple[Row, ...]:
    """Return the rows of a table.

    Raises ValueError, with the name of the row, if a field is missing or unknown, or
    if a row has no speed or refers to no chip of the table.
    """
    values = json.loads(table.read_text())
    chips = {
        name: _rates(chip["rates"]) for name, chip in values.get("chips", {}).items()
    }
    rows = []
    for row in values["rows"]:
        problem = _problem(row, chips)
        if problem:
            raise ValueError(f"{table}: the row {row.get('name')!r} {problem}")
        overrides = tuple(row["overrides"])
        pairs = tuple((slices, speed) for slices, speed in row.get("kept", []))
        chip = chips[row["chip"]] if "chip" in row else {}
        rows.append(Row(**row | {"overrides": overrides, "kept": pairs, "chip": chip}))
    return tuple(rows)


def _problem(row: dict[str, Any], chips: dict[str, Any]) -> str | None:
    """Return why a row is refused, or None."""
    required = {
        item.name
        for item in fields(Row)
        if item.default is MISSING and item.default_factory is MISSING
    }
    if missing := required - row.keys():
        return f"has no {', '.join(sorted(missing))}. Add the missing fields."
    if unknown := row.keys() - {item.name for item in fields(Row)}:
        return f"has the unknown fields {', '.join(sorted(unknown))}. Remove them."
    if ("flops" in row) == ("tokens" in row):
        return "must have one speed: flops or tokens."
    if "chip" in row and row["chip"] not in chips:
        return f"has the chip {row['chip']!r}. Add it to the table's chips."
    return None


def _rates(rates: dict[str, Any]) -> dict[str, Any]:
    """Return the rates of a chip under the fields of `Chip` and `Achievable`."""
    rates = dict(rates)
    if "attention" in rates:
        by_dim = rates["attention"]["fractions"]
        fractions = {int(head_dim): fraction for head_dim, fraction in by_dim.items()}
        rates["attention"] = AttentionRates(
            fractions, rates["attention"]["half_length"]
        )
    if "grouped" in rates:
        rates["grouped"] = GroupedRates(**rates["grouped"])
    return rates
