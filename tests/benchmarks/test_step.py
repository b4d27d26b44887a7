"""Contenders of the benchmark of steps are compared before they are timed."""

import pytest

from benchmarks.contenders import check


class Scripted:
    """A contender with given losses."""

    def __init__(self, name: str, last: float) -> None:
        self.name = name
        self.losses = [6.0, last]
        self.ended = False

    def ask(self, command: str) -> dict[str, float]:
        return {"loss": self.losses.pop(0), "seconds": 0.1}

    def quit(self) -> None:
        self.ended = True


def test_a_torch_variant_that_computes_something_else_is_left_out(capsys):
    contenders = [Scripted("torch-eager-f32", 4.6), Scripted("torch-eager-bf16", 5.1)]
    contenders.append(Scripted("longhaul", 4.65))
    passing = check(contenders)  # type: ignore[arg-type]
    assert [contender.name for contender in passing] == ["torch-eager-f32", "longhaul"]
    assert [contender.ended for contender in contenders] == [False, True, False]
    assert "torch-eager-bf16: losses differ" in capsys.readouterr().out


@pytest.mark.parametrize("last", [5.9, 5.1])  # it does not fall; it falls differently
def test_it_is_an_error_if_longhaul_computes_something_else(last):
    contenders = [Scripted("torch-eager-f32", 4.6), Scripted("longhaul", last)]
    with pytest.raises(SystemExit, match="longhaul: "):
        check(contenders)  # type: ignore[arg-type]
