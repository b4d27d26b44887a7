"""All drills, by number."""

from tests.drills import preemption
from tests.drills.drill import Drill

_THEMES = (preemption,)

DRILLS = sorted(
    (
        found
        for theme in _THEMES
        for found in vars(theme).values()
        if isinstance(found, Drill)
    ),
    key=lambda drill: drill.number,
)
