"""Imports run one way, and say what each package may know."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY

# What stands in a line imports only lines above it, and its own part between bars. A
# name is a module, or a folder with all in it that has no line of its own; the last
# line are commands.
LAYERS = """
    model | data
    train.masking_rules train.masking train.errors train.units train.core.choices \
train.config train.console train.identity
    train.core.mesh_sizes
    train.cli
    train.core.mesh
    train.hardware
    train.core.recipe train.core.runtime train.core.sharding train.core.optimizer \
train.optimizers train.core.spikes train.core.state train.core.loss train.core.rows \
train.core.numerics train.core.step train.core.eval_step train.core.router_balance \
train.core.program train.core.feed train.core.execution train.core.model_flops \
train.evaluate.validation train.evaluate.harness train.evaluate.tasks train.describe \
train.sample.generate train.sample.prompts
    train.distributed
    train.run
    train.plan.config train.plan.aot train.plan.cost train.plan.budget \
train.plan.memory train.plan.sections train.plan.branches
    train.plan.compiled | train.plan.estimated
    train.core.phases
    train.plan | train.profile | train.prove | train.coordinates | \
train.pretrained | train.log_window train.core.due train.core.loop \
train.evaluate.evaluator train.evaluate.results train.load_run
    train.plan.search
    train.preflight
    train.start
    launch
    train.__main__ train.plan.__main__ train.evaluate.__main__ train.sample.__main__ \
train.export train.checkpoints train.status train.report train.profile.__main__ \
train.prove.__main__ train.coordinates.__main__ train.branch \
data.prepare data.inspect data.verify data.train_tokenizer launch.__main__
"""
RANK = {
    name: (number, side)
    for number, line in enumerate(LAYERS.strip().split("\n"))
    for side, part in enumerate(line.split("|"))
    for name in part.split()
}
# The lines that can be reached by imports, also those inside functions. They may only
# fall: lower a limit when a change allows it.
MAX_REACHED_LINES = {
    "model.gpt": 4_400,
    "train.core.step": 6_700,
    "train.core.program": 17_200,
    "train.core.loop": 33_900,
    "train.start": 37_100,
}
# Imports inside functions that do not count, each with its reason.
RARE_IMPORTS = {
    ("train.preflight", "train.plan"): "only with mesh=planned",
    ("train.start", "train.prove"): "only with runtime.prove_kernels=true",
}
CORE = ("model", "train.core")
PARTS = ("model.parts", "model.catalog")  # optional parts, and all of them by name
CHOOSE_PARTS = ("train.core.program", "train.core.execution")
COMMANDS = LAYERS.strip().split("\n")[-1].split()
# The words of the command line: keys, exit codes, names of machines.
LAUNCH_MAY = ("launch", "train.config", "train.errors", "train.cli", "train.hardware")
LAUNCH_MAY += ("train.identity", "train.run.folder", "train.run.liveness")
LAUNCH_MAY += ("data.errors", "data.names", "data.storage", "data.key_value_store")
LAUNCH_MAY += ("train.run.records", "train.masking", "train.distributed.messages")
# Beside the standard library and what LAYERS allows.
MODEL_MAY = {"jax", "flax", "numpy", "jaxtyping", "annotated_types", "model"}
MODEL_MAY |= {"typing_extensions"}
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax"}
NO_JAX = ("data", "train.cli", "train.hardware.chips", "train.hardware.targets")


def place(module: str) -> str:
    """Return the name in LAYERS that stands for a module, "" if there is none."""
    while module and module not in RANK:
        module = module.rpartition(".")[0]
    return module


def imports(path: Path, inside_functions: bool = True) -> set[str]:
    """Return the modules imported anywhere in a file, and the names out of them."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_run_one_way():
    for package in ("train", "model", "data", "launch"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
            own = place(module)
            used = imports(path)
            if path.name == "__init__.py":
                continue
            assert own, f"{module}: give it a place in LAYERS"
            for other in filter(place, used):
                theirs = place(other)
                below = own != theirs and RANK[theirs][0] >= RANK[own][0]
                same_part = RANK[theirs] == RANK[own] and own not in COMMANDS
                assert not below or same_part, f"{module} imports {other}, below it"
                if own == "launch":
                    assert other.startswith(LAUNCH_MAY), f"{module} imports {other}"
            tops = {name.split(".")[0] for name in used}
            if own == "model":
                assert tops <= MODEL_MAY | sys.stdlib_module_names, module
            if module.startswith(NO_JAX) and own not in COMMANDS:
                assert not tops & HEAVY, module


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """The files of the product, by module."""
    by_module = dict[str, Path]()
    for package in ("train", "model", "data", "launch"):
        for path in (REPOSITORY / package).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            by_module[".".join(parts).removesuffix(".__init__")] = path
    return by_module


def reached_from(files: dict[str, Path], start: str) -> set[str]:
    """Return the modules that a module imports, directly and indirectly."""
    reached = set[str]()
    pending = [start]
    while pending:
        module = pending.pop()
        if module in reached:
            continue
        reached.add(module)
        rare = tuple(room for importer, room in RARE_IMPORTS if importer == module)
        for name in imports(files[module]):
            if not name.startswith(rare):
                pending += {name, name.rpartition(".")[0]} & files.keys()
    return reached


@pytest.mark.parametrize(("start", "limit"), MAX_REACHED_LINES.items())
def test_a_module_reaches_at_most_so_many_lines(files, start, limit):
    reached = reached_from(files, start)
    lines = sum(files[name].read_text().count("\n") for name in reached)
    assert lines <= limit, f"{start} reaches {lines} lines in {len(reached)} modules"


def test_the_core_is_closed_under_import(files):
    """Optional parts are handed to the core as values."""
    for module, path in files.items():
        if module.startswith(CORE) and not module.startswith((*PARTS, *CHOOSE_PARTS)):
            used = {name for name in imports(path) if name.startswith(PARTS)}
            assert not used, f"{module} imports {used}"


def test_a_step_knows_no_config(files):
    """It takes a `Recipe`. Only the model has a config of its own."""
    configs = ("train.config", "data.config", "train.cli")
    reached = reached_from(files, "train.core.step")
    assert not {module for module in reached if module.startswith(configs)}


@pytest.mark.parametrize(("module", "room"), RARE_IMPORTS)
def test_a_rare_import_is_inside_a_function(files, module, room):
    assert any(name.startswith(room) for name in imports(files[module]))
    at_the_top = imports(files[module], inside_functions=False)
    assert not any(name.startswith(room) for name in at_the_top)


def test_what_a_match_does_not_know_is_an_error():
    """`case _` calls `assert_never`, so that a type checker finds what is missing."""
    for package in ("model", "data", "train", "launch"):
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                is_case = isinstance(node, ast.match_case) and node.guard is None
                if is_case and ast.unparse(node.pattern) == "_":
                    body = "\n".join(map(ast.unparse, node.body))
                    assert body.startswith("assert_never("), f"{path}: {body}"


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
    code = NO_JAX_YET.format(commands=COMMANDS)
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
