"""Fixtures that start trainers with watchdogs, and end them after the test."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY
from tests.program import program_code
from tests.train.distributed.trainers import SETUP, Start, Trainer


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts code with a watchdog; kill trainers after the test.

    start(code, process=0, processes=1, folder=tmp_path, wrapper=(), **config)
    """
    trainers: list[Trainer] = []

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
            [*wrapper, sys.executable, "-c", program_code(SETUP + code), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        trainers.append(Trainer(popen))
        return trainers[-1]

    yield start
    for trainer in trainers:
        trainer.popen.kill()
        trainer.popen.communicate()
