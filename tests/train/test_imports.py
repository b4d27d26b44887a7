"""Imports run one way, and say what each package may know."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY

# What stands in a line imports only lines above it, and its own. A name is a module of
# train/, or a folder with all that is in it.
LAYERS = """
    errors units config console identity
    mesh_sizes
    cli
    mesh
    hardware
    flops runtime sharding optimizer spikes state loss step program feed evaluation \
generate describe
    distributed
    run
    results load_run log_window loop | plan
    preflight
    start
"""
COMMANDS = {
    *("train.__main__", "train.plan.__main__", "train.evaluate", "train.sample"),
    *("train.checkpoints", "train.status"),
    *("data.prepare", "data.inspect", "data.verify", "data.train_tokenizer"),
    "launch.__main__",
}
MODEL_MAY = {"jax", "flax", "numpy", "jaxtyping", "annotated_types", "model"}
DATA_MAY_NOT = {"jax", "jaxlib", "flax", "optax", "orbax", "model", "train"}
# The words of the command line: keys, exit codes, names of machines.
LAUNCH_MAY = {"train.config", "train.errors", "train.cli", "train.hardware"}
LAUNCH_MAY |= {"train.identity", "train.run.storage", "train.run.liveness"}
NO_JAX = ("train.cli", "train.hardware.chips", "train.hardware.targets")


def imports(path: Path) -> set[str]:
    """Give the modules imported anywhere in a file, `train.config` for either form."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {str(node.module)}
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


ALL = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): imports(path)
    for package in ("train", "model", "data", "launch")
    for path in sorted((REPOSITORY / package).rglob("*.py"))
    if path.name != "__init__.py"
}


def inside(module: str, *places: str) -> bool:
    """Tell whether a module is one of these, or lies in one of these folders."""
    return any(f"{module}.".startswith(f"{place}.") for place in places)


def test_inside_train_imports_run_one_way():
    lines = LAYERS.strip().split("\n")
    rank = {
        f"train.{name}": (number, side)
        for number, line in enumerate(lines)
        for side, part in enumerate(line.split("|"))
        for name in part.split()
    }
    for module in ALL.keys() - COMMANDS:
        if not inside(module, "train"):
            continue
        (place,) = [p for p in rank if inside(module, p)] or pytest.fail(
            f"{module}: give it a place in LAYERS"
        )
        for other in ALL[module]:
            for above in (p for p in rank if inside(other, p)):
                lower, same = (
                    rank[above][0] < rank[place][0],
                    rank[above] == rank[place],
                )
                assert lower or same, f"{module} imports {other}, which stands below it"


def test_nothing_imports_a_command():
    for module, names in ALL.items():
        assert not names & COMMANDS, module


def test_packages_know_only_what_they_may():
    for module, names in ALL.items():
        package = module.split(".")[0]
        tops = {name.split(".")[0] for name in names}
        if package == "model":
            assert tops <= MODEL_MAY | sys.stdlib_module_names, module
        elif package == "data" and module not in COMMANDS:
            assert not tops & DATA_MAY_NOT, module
        elif package == "launch" and module not in COMMANDS:
            assert not tops & {"model", "data"}, module
            of_train = [name for name in names if inside(name, "train")]
            assert all(inside(name, *LAUNCH_MAY) for name in of_train), module
        if package != "launch":
            assert "launch" not in tops, module
        if inside(module, *NO_JAX):
            assert not tops & {"jax", "flax"}, module


def test_the_two_ways_to_know_a_step_do_not_know_each_other():
    compiled, estimated, cost = (
        f"train.plan.{name}" for name in ("compiled", "estimated", "cost")
    )
    for module, names in ALL.items():
        others = [name for name in names if inside(name, compiled, estimated)]
        if inside(module, compiled):
            assert all(inside(name, compiled) for name in others), module
        elif inside(module, estimated):
            assert all(inside(name, estimated) for name in others), module
        elif module == cost:
            assert not others


def test_there_are_no_cycles():
    graph = {module: names & ALL.keys() for module, names in ALL.items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above, module])
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*above, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


NO_JAX_YET = """
import importlib, sys
from contextlib import suppress

for command in {commands}:
    importlib.import_module(command)
from train.__main__ import main, run_command

for typed in (["--help"], ["train.num_stepz=1"], ["--cfg", "job"]):
    sys.argv[1:] = typed
    with suppress(SystemExit):
        run_command(main)
heavy = {{"jax", "flax", "grain", "orbax", "pyarrow", "wandb"}} & sys.modules.keys()
assert not heavy, heavy
"""


def test_help_mistakes_and_status_do_not_wait_for_jax():
    code = NO_JAX_YET.format(commands=sorted(COMMANDS))
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
