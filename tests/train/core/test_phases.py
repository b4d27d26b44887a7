"""The steps of the next phase are compiled while those of a phase run."""

from types import SimpleNamespace

from data.phases import Phase
from train.core.phases import PhaseSteps


class Compiler:
    """A program that records when its step is compiled."""

    def __init__(self, compiled: list[str], name: str):
        self.state = self.batch = None
        self.train_step = SimpleNamespace(lower=lambda *_: self)
        self.compile = lambda: compiled.append(name)


def test_the_next_phase_is_compiled_ahead_unless_the_run_ends_before():
    compiled: list[str] = []
    first_batches = {"a": 0, "b": 5, "c": 10}
    programs = {
        Phase(n, 4, 16): Compiler(compiled, k) for k, n in first_batches.items()
    }
    steps = PhaseSteps(programs, last_batch=9, is_watched=False)
    steps.get(3)
    steps.begin(5).result()
    assert compiled == ["a", "b"]
    steps.get(9)
    steps.begin(0).result()
    assert compiled == ["a", "b"]
