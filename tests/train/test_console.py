import io
import re
import sys
from contextlib import closing

import pytest

from train import console as progress
from train.console import Progress, print_table, printable, show_compilation
from train.units import format_bytes, format_count, format_flops, format_seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Make `sys.<name>` a terminal of 80 columns and return it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def make(name: str) -> Terminal:
        stream = Terminal()
        monkeypatch.setattr(sys, name, stream)
        return stream

    return make


def _screen(stream: Terminal) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


def test_plain_lines_first_last_and_every_five_seconds(capsys, clock):
    bar = Progress(num_steps=1300, start_step=1000, peak_known=True)
    for step in range(1010, 1301, 10):
        clock.now += 1.0
        bar.update(step, 3.21, 1.2e6, 0.412)
    out, err = capsys.readouterr()
    bar.close()
    assert capsys.readouterr().err == ""
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "step 1,010/1,300  loss 3.2100  1.2M tokens/s  MFU 41.2%"
    # 24 updates of one second each are left; only the speed of this start counts.
    assert lines[1].endswith("MFU 41.2%  24 s left")
    steps = [int(line.split("/")[0][5:].replace(",", "")) for line in lines]
    assert steps == [1010, 1060, 1110, 1160, 1210, 1260, 1300]
    assert "left" not in lines[-1]


def test_a_run_that_is_stopped_still_prints_its_last_line(capsys, clock):
    with closing(Progress(100, 0, peak_known=False)) as bar:
        bar.update(1, 3.0, 10, None)
        bar.update(2, float("nan"), 10, None)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "2/100"]
    assert "nan" in lines[1]


def test_a_note_is_printed_as_it_is(capsys):
    Progress(10, 0, False).note("mesh [data=2] " + "x" * 200)
    assert capsys.readouterr().err == "mesh [data=2] " + "x" * 200 + "\n"


def test_a_terminal_gets_a_bar_and_stdout_stays_clean(terminal, capsys):
    screen = terminal("stderr")
    bar = Progress(2000, 500, peak_known=True)
    bar.update(1000, 3.25, 1.2e6, 0.412)
    bar.note("saved [step]")
    print("a result")
    bar.close()
    text = _screen(screen)
    for part in ("1,000/2,000", "loss 3.2500 · 1.2M tokens/s", "saved [step]", "━"):
        assert part in text
    assert "a result" not in text
    assert capsys.readouterr().out == "a result\n"


@pytest.mark.parametrize(
    ("mean", "memory", "figures"),
    [
        (None, None, "loss 2.6500  10 tokens/s"),
        (3.35, None, "loss 2.6500 (mean 3.3500)  10 tokens/s"),
        (3.35, 3 * 2**29, "loss 2.6500 (mean 3.3500)  10 tokens/s  1.50 GiB"),
        (float("nan"), 0, "loss 2.6500 (mean nan)  10 tokens/s  0 B"),
    ],
)
def test_the_mean_of_the_window_and_the_memory_are_shown(capsys, mean, memory, figures):
    Progress(100, 0, peak_known=False).update(10, 2.65, 10, None, mean, memory)
    assert capsys.readouterr().err == f"step 10/100  {figures}\n"


def test_compilation_is_shown_with_its_time(terminal, capsys, clock):
    with show_compilation():
        assert capsys.readouterr().err == "compiling   the training step\n"
        clock.now += 75
    assert capsys.readouterr().err == "compiled    in 1 min 15 s\n"
    with show_compilation(show=False):
        pass
    assert capsys.readouterr().err == ""
    screen = terminal("stderr")
    with show_compilation():
        clock.now += 75
    assert re.search(r"compiling the training step +0:0", _screen(screen))


ROWS = [["w" * 150, "1.50 GiB", "[fsdp]"], ["b", "12 B", ""]]


def test_a_table_in_a_pipe_is_aligned_and_uncut(capsys):
    print_table(ROWS, ["array", "size", "axes"], "Arrays")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Arrays"
    assert lines[1] == "array".ljust(150) + "      size  axes"
    assert lines[3] == "w" * 150 + "  1.50 GiB  [fsdp]"
    assert lines[4] == "b".ljust(150) + "      12 B"


def test_a_table_on_a_terminal_loses_nothing(terminal):
    screen = terminal("stdout")
    print_table(ROWS, ["array", "size", "axes"], "Arrays [all]")
    text = _screen(screen)
    assert text.count("w") == 150
    for part in ("Arrays [all]", "1.50 GiB", "[fsdp]"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("formatted", "texts"),
    [
        (
            format_bytes,
            {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 2**20 - 1: "1.00 MiB"},
        ),
        (
            format_count,
            {0: "0", 999: "999", 999.7: "1K", 12_345: "12.3K", 999_600: "1M"},
        ),
        (format_count, {1.2404e9: "1.24B", 15e12: "15T", 3.3e15: "3,300T"}),
        (format_flops, {0: "0 FLOPs", 4.231e9: "4.23 GFLOPs", 9.997e14: "1 PFLOPs"}),
        (format_seconds, {0: "0 s", 3e-4: "300 µs", 2e-9: "2 ns", 0.0123: "12 ms"}),
        (format_seconds, {0.9999: "1.0 s", 9.96: "10 s", 59.6: "1 min 00 s"}),
        (format_seconds, {200: "3 min 20 s", 3599.8: "1 h 00 min", 86_399: "1 d 00 h"}),
    ],
)
def test_numbers_are_formatted_for_people(formatted, texts):
    assert {number: formatted(number) for number in texts} == texts


def test_control_characters_are_escaped():
    text = "def f():\n\tpass  # é 日本 \x1b[31m\r\x07\x9b\u202e\0"
    assert printable(text) == (
        "def f():\n\tpass  # é 日本 \\x1b[31m\\r\\x07\\x9b\\u202e\\x00"
    )
