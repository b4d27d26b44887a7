"""All drills, by number."""

from tests.drills import damage, preemption, saves
from tests.drills.drill import Drill

_THEMES = (preemption, saves, damage)

DRILLS = sorted(
    (
        one
        for theme in _THEMES
        for one in vars(theme).values()
        if isinstance(one, Drill)
    ),
    key=lambda drill: drill.number,
)
