"""Imports run one way, and LAYERS lists what each package may import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY

# The modules of a line import only the lines above it, and their own part between bars.
# A name is a module, or a folder with all its modules that have no other line. The
# modules of the last line are commands.
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
# These limits count the lines that a module reaches by imports, including imports
# inside functions, but not what only the catalogs bring. A limit may only fall: lower
# it when a change allows it.
MAX_REACHED_LINES = {
    "model.gpt": 4_400,
    "train.core.step": 6_700,
    "train.core.program": 15_100,
    "train.core.loop": 29_100,
    "train.start": 32_300,
}
# These imports inside functions do not count, each for its reason.
RARE_IMPORTS = {
    ("train.preflight", "train.plan"): "only with mesh=planned",
    ("train.start", "train.prove"): "only with runtime.prove_kernels=true",
}
CORE = ("model", "train.core")
CATALOGS = ("model.catalog", "data.catalog")  # what they list is handed in as values
PARTS = ("model.parts", "model.catalog")  # optional parts, and their catalog
CHOOSE_PARTS = ("train.core.program", "train.core.execution")
COMMANDS = LAYERS.strip().split("\n")[-1].split()
# The launcher knows the words of the command line: keys, exit codes, machine names.
LAUNCH_MAY = ("launch", "train.config", "train.errors", "train.cli", "train.hardware")
LAUNCH_MAY += ("train.identity", "train.run.folder", "train.run.liveness")
LAUNCH_MAY += ("data.errors", "data.names", "data.storage", "data.key_value_store")
LAUNCH_MAY += ("train.run.records", "train.masking", "train.distributed.messages")
# The model may import only these packages and the standard library.
MODEL_MAY = {"jax", "flax", "numpy", "jaxtyping", "annotated_types", "model"}
MODEL_MAY |= {"typing_extensions"}
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax"}
NO_JAX = ("data", "train.cli", "train.hardware.chips", "train.hardware.targets")


def layer_name(module: str) -> str:
    """Return the name in LAYERS that covers a module, or "" if there is none."""
    while module and module not in RANK:
        module = module.rpartition(".")[0]
    return module


def imports(path: Path, inside_functions: bool = True) -> set[str]:
    """Return the modules that a file imports, and the names imported from modules."""
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
            layer = layer_name(module)
            all_imported = imports(path)
            if path.name == "__init__.py":
                continue
            assert layer, f"{module}: give it a place in LAYERS"
            for imported in filter(layer_name, all_imported):
                imported_layer = layer_name(imported)
                is_below = (
                    layer != imported_layer
                    and RANK[imported_layer][0] >= RANK[layer][0]
                )
                same_part = (
                    RANK[imported_layer] == RANK[layer] and layer not in COMMANDS
                )
                assert not is_below or same_part, (
                    f"{module} imports {imported}, below it"
                )
                if layer == "launch":
                    assert imported.startswith(LAUNCH_MAY), (
                        f"{module} imports {imported}"
                    )
            top_level = {name.split(".")[0] for name in all_imported}
            if layer == "model":
                assert top_level <= MODEL_MAY | sys.stdlib_module_names, module
            if module.startswith(NO_JAX) and layer not in COMMANDS:
                assert not top_level & HEAVY, module


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """Return the files of the product, by module."""
    by_module = dict[str, Path]()
    for package in ("train", "model", "data", "launch"):
        for path in (REPOSITORY / package).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            by_module[".".join(parts).removesuffix(".__init__")] = path
    return by_module


def reached_from(files: dict[str, Path], start: str) -> set[str]:
    """Return the modules that a module imports, directly and indirectly.

    What only the catalogs import is left out.
    """
    reached = set[str]()
    queue = [start]
    while queue:
        module = queue.pop()
        if module in reached:
            continue
        reached.add(module)
        if module in CATALOGS:
            continue
        rare_imports = tuple(
            room for importer, room in RARE_IMPORTS if importer == module
        )
        for name in imports(files[module]):
            if not name.startswith(rare_imports):
                queue += {name, name.rpartition(".")[0]} & files.keys()
    return reached


@pytest.mark.parametrize(("start", "limit"), MAX_REACHED_LINES.items())
def test_a_module_reaches_at_most_its_limit_of_lines(files, start, limit):
    reached = reached_from(files, start)
    lines = sum(files[name].read_text().count("\n") for name in reached)
    assert lines <= limit, f"{start} reaches {lines} lines in {len(reached)} modules"


def test_the_core_is_closed_under_import(files):
    """Optional parts are handed to the core as values."""
    for module, path in files.items():
        if module.startswith(CORE) and not module.startswith((*PARTS, *CHOOSE_PARTS)):
            parts = {name for name in imports(path) if name.startswith(PARTS)}
            assert not parts, f"{module} imports {parts}"


def test_a_step_knows_no_config(files):
    """A step takes a `Recipe`. Of the configs it knows only that of the model."""
    configs = ("train.config", "data.config", "train.cli")
    reached = reached_from(files, "train.core.step")
    assert not {module for module in reached if module.startswith(configs)}


def test_a_reader_of_stores_reaches_no_reader_of_text(files):
    """The catalog of data hands the encoding of text to whoever opens stores."""
    text = ("data.text", "data.catalog")
    reached = reached_from(files, "data.sources")
    assert not {module for module in reached if module.startswith(text)}


@pytest.mark.parametrize(("module", "room"), RARE_IMPORTS)
def test_a_rare_import_is_inside_a_function(files, module, room):
    assert any(name.startswith(room) for name in imports(files[module]))
    top_level_imports = imports(files[module], inside_functions=False)
    assert not any(name.startswith(room) for name in top_level_imports)


def test_a_match_with_a_missing_case_is_an_error():
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
