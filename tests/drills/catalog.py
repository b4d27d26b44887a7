"""The catalog lists all drills by number."""

from tests.drills import (
    changes,
    damage,
    disks,
    inputs,
    kills,
    ownership,
    preemption,
    processes,
    saves,
)
from tests.drills.drill import Drill

_THEMES = (
    *(preemption, saves, damage, disks, processes, inputs, changes, ownership, kills),
)

DRILLS = sorted(
    (
        value
        for theme in _THEMES
        for value in vars(theme).values()
        if isinstance(value, Drill)
    ),
    key=lambda drill: (isinstance(drill.number, str), drill.number),
)
