"""Trainers with watchdogs, and none that is left."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY
from tests.train.distributed.trainers import SETUP, Start, Trainer


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Run code after a watchdog was started; kill what is left.

    start(code, process=0, processes=1, folder=tmp_path, wrapper=(), **config)
    """
    started: list[Trainer] = []

    def start(
        code: str,
        process: int = 0,
        processes: int = 1,
        folder: object = tmp_path,
        wrapper: tuple[str, ...] = (),
        **config: object,
    ) -> Trainer:
        arguments = [str(folder), str(process), str(processes), repr(config)]
        popen = subprocess.Popen(
            [*wrapper, sys.executable, "-c", SETUP + code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        started.append(Trainer(popen))
        return started[-1]

    yield start
    for trainer in started:
        trainer.popen.kill()
        trainer.popen.communicate()
