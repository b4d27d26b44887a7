"""Processes stop together, wait for each other, and name one that does not answer."""

from pathlib import Path

import pytest

from tests.fleet import TINY, Fleet, of_text, write_text
from tests.program import program_code

pytestmark = pytest.mark.slow

PRELUDE = """
import os, signal, sys, time
import jax
from train.distributed.joining import join
from train.cli.command import compose, configure_logging
from train.core.services import SAVE
from train.distributed.preemption import Preemption

configure_logging()
config = compose(sys.argv[1:]).distributed
preemption = Preemption()
"""
JOIN = """
cluster = join(config, "", preemption.hold)
first = cluster.is_leader
"""
# Process 0 leaves last, because it serves the requests of the others.
END = """
jax.distributed.shutdown()
sys.stdout.flush(); sys.stderr.flush()
os._exit(0)
"""


def run(folder: Path, *code: str) -> tuple[list[int], list[str]]:
    """Run code on two processes; return their exit codes and outputs."""
    (folder / "drill.py").write_text(program_code("".join([PRELUDE, *code, END])))
    timeouts = ("distributed.init_timeout_s=40", "distributed.barrier_timeout_s=12")
    fleet = Fleet(folder, timeouts, 2, module="drill")
    return fleet.wait(120), [fleet.said(process) for process in range(2)]


def test_a_signal_while_jax_connects_the_processes_stops_all(tmp_path):
    """The other process waits for this one, and would wait for minutes if it left."""
    signal_while_connecting = """
connect = jax.distributed.initialize

def initialize(*args, **kwargs):
    if args[2] == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    connect(*args, **kwargs)

jax.distributed.initialize = initialize
"""
    wait_for_signal = "preemption.connect(cluster); time.sleep(60)\n"
    codes, outputs = run(tmp_path, signal_while_connecting, JOIN, wait_for_signal)
    assert codes == [42, 42], outputs


def test_a_process_that_does_not_answer_a_request_is_named(tmp_path):
    code = """
if first:
    preemption.connect(cluster)
    preemption.request(SAVE)
time.sleep(60)
"""
    codes, outputs = run(tmp_path, JOIN, code)
    assert codes[0] == 134, outputs
    assert "could not agree: no answer from process 1 within" in outputs[0]


def test_the_others_wait_as_long_as_a_search_makes_progress(tmp_path):
    """They wait longer than for a process that reports nothing."""
    code = """
from train import preflight
from train.catalog import START_PARTS
from train.distributed.processes import Cluster
from train.plan.search import search
from train.plan.search.candidates import Layout

def choose(searched):
    for _ in range(60):
        time.sleep(0.1)
        searched.beat()
    return Layout(1, len(searched.devices), 1, 1, 1, "none", 1)

class Impatient(Cluster):
    def agree(self, facts):
        cluster.agree(facts)

preemption.connect(cluster)
search.Search.choose = choose
beats = []
impatient = Impatient(cluster.process, cluster.processes, 2.0, cluster._rounds)
planned = compose([*sys.argv[1:], *TINY, "data.batch_size=16", "mesh=planned"])
beat = lambda: beats.append(1)
prepared = preflight.Prepared(planned, impatient, START_PARTS, beat)
fsdp = prepared.config.mesh.fsdp
print(fsdp == jax.device_count(), len(beats) > 10, file=sys.stderr)
preemption.close()
"""
    text = *TINY, *of_text(write_text(tmp_path))
    codes, outputs = run(tmp_path, f"TINY = {text!r}\n", JOIN, code)
    assert codes == [0, 0], outputs
    assert all("True True" in text for text in outputs), outputs
