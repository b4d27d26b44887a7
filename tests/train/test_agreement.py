"""What processes ask of each other when they are not training, and fail to answer."""

from pathlib import Path

import pytest

from tests.fleet import TINY, Fleet, of_text, write_text

pytestmark = pytest.mark.slow

PRELUDE = """
import os, signal, sys, time
import jax
from train.distributed.processes import join
from train.cli.command import compose, configure_logging
from train.distributed.preemption import SAVE, Preemption

configure_logging()
config = compose(sys.argv[1:]).distributed
preemption = Preemption()
"""
JOIN = """
cluster = join(config, preemption.hold)
first = cluster.is_leader
"""
# Process 0 leaves last: with it goes what the others still ask.
END = """
jax.distributed.shutdown()
sys.stdout.flush(); sys.stderr.flush()
os._exit(0)
"""


def run(folder: Path, *code: str) -> tuple[list[int], list[str]]:
    """Run code on two processes; give exit codes and what they said."""
    (folder / "drill.py").write_text("".join([PRELUDE, *code, END]))
    times = ("distributed.init_timeout_s=40", "distributed.barrier_timeout_s=12")
    fleet = Fleet(folder, times, 2, module="drill")
    return fleet.wait(120), [fleet.said(process) for process in range(2)]


def test_a_signal_while_jax_connects_the_processes_stops_all(tmp_path):
    """The others wait for this one by then, and for minutes if it left alone."""
    signalled = """
connect = jax.distributed.initialize

def initialize(*args, **kwargs):
    if args[2] == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    connect(*args, **kwargs)

jax.distributed.initialize = initialize
"""
    connected = "preemption.connect(cluster); time.sleep(60)\n"
    codes, said = run(tmp_path, signalled, JOIN, connected)
    assert codes == [42, 42], said


def test_one_that_does_not_answer_a_request_is_named(tmp_path):
    code = """
if first:
    preemption.connect(cluster)
    preemption.request(SAVE)
time.sleep(60)
"""
    codes, said = run(tmp_path, JOIN, code)
    assert codes[0] == 134, said
    assert "could not agree: no answer from process 1 within" in said[0]


def test_the_others_wait_as_long_as_a_search_makes_progress(tmp_path):
    """Longer than they wait for a process that says nothing."""
    code = """
from train import preflight
from train.distributed.processes import Cluster
from train.plan.search import search
from train.plan.search.candidates import Layout

def choose(config, devices, beat=lambda: None):
    for _ in range(60):
        time.sleep(0.1)
        beat()
    return Layout(1, len(devices), 1, 1, 1, "none", 1)

class Impatient(Cluster):
    def agree(self, facts):
        cluster.agree(facts)

preemption.connect(cluster)
search.choose, beats = choose, []
impatient = Impatient(cluster.process, cluster.processes, 2.0, cluster._rounds)
planned = compose([*sys.argv[1:], *TINY, "data.batch_size=16", "mesh=planned"])
prepared = preflight.Prepared(planned, impatient, lambda: beats.append(1))
fsdp = prepared.config.mesh.fsdp
print(fsdp == jax.device_count(), len(beats) > 10, file=sys.stderr)
preemption.close()
"""
    text = *TINY, *of_text(write_text(tmp_path))
    codes, said = run(tmp_path, f"TINY = {text!r}\n", JOIN, code)
    assert codes == [0, 0], said
    assert all("True True" in text for text in said), said
