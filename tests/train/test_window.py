"""What is said of a window of steps."""

from types import SimpleNamespace

from train.window import Window


def test_late_data_is_said_once_and_not_of_the_first_window():
    window = object.__new__(Window)
    data = SimpleNamespace(prefetch=2)
    window._program = SimpleNamespace(config=SimpleNamespace(data=data))
    window._warned = None
    notes = []
    progress = SimpleNamespace(note=notes.append)
    for waiting in (0.5, 0.01, 0.031, 0.9):
        window._warn(waiting, progress)
    (note,) = notes
    assert "takes 3.1% of the time: raise data.prefetch=2" in note
