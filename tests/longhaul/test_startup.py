"""What a command needs no device for does not wait for JAX."""

import os
import subprocess
import sys

from data.program import PREFIX, ROOT
from longhaul.commands import COMMANDS
from tests.program import program_code

NO_JAX_YET = """
import importlib, sys
from contextlib import suppress

for command in {commands}:
    importlib.import_module(command)
from train.__main__ import COMMAND, run_command

for typed in (["--help"], ["train.num_stepz=1"], ["--cfg", "job"], ["--cfg", "schema"]):
    sys.argv[1:] = typed
    with suppress(SystemExit):
        run_command(COMMAND)
heavy = {{"jax", "flax", "grain", "orbax", "pyarrow", "wandb"}} & sys.modules.keys()
assert not heavy, heavy
"""


def test_help_mistakes_and_status_do_not_wait_for_jax():
    commands = [PREFIX + module for module, _ in COMMANDS.values()]
    code = program_code(NO_JAX_YET.format(commands=commands))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
