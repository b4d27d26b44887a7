"""Imports run one way, and LAYERS lists what each package may import."""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import REPOSITORY
from tests.program import SOURCE_TREE

pytestmark = SOURCE_TREE

# The modules of a line import only the lines above it, and their own part between bars.
# A name is a module, or a folder with all its modules that have no other line. The
# modules of the last line but one are commands.
LAYERS = """
    data
    model
    train.masking_rules train.masking train.errors train.units train.core.choices \
train.core.shards train.own_parts train.config train.console train.identity \
train.page train.liveness
    train.resolve.mesh_sizes
    train.recorded_parts
    train.cli
    train.records train.resolve.mesh
    train.hardware
    train.core.recipe train.core.optimizer train.core.spikes train.core.state \
train.core.loss train.core.rows train.core.numerics train.core.step \
train.core.eval_step train.core.router_balance train.core.layout train.core.program \
train.core.feed train.core.model_flops train.core.phases train.core.services \
train.core.due train.core.log_window train.core.loop train.runtime \
train.optimizers train.losses train.resolve \
train.evaluate.validation train.evaluate.harness train.evaluate.tasks train.describe \
train.sample.generate train.sample.prompts
    train.distributed
    train.run
    train.plan.config train.plan.aot train.plan.cost train.plan.budget \
train.plan.memory train.plan.sections train.plan.branches
    train.plan.compiled | train.plan.estimated
    train.plan | train.profile | train.prove | train.coordinates | \
train.pretrained | train.evaluate.results train.load_run
    train.plan.search
    train.start_parts
    train.evaluate.evaluator
    train.catalog train.preflight
    train.start
    launch
    train.__main__ train.plan.__main__ train.evaluate.__main__ train.sample.__main__ \
train.export train.checkpoints train.status train.report train.profile.__main__ \
train.prove.__main__ train.coordinates.__main__ train.branch \
data.prepare data.inspect data.verify data.train_tokenizer launch.__main__
    longhaul
"""
RANK = {
    name: (number, side)
    for number, line in enumerate(LAYERS.strip().split("\n"))
    for side, part in enumerate(line.split("|"))
    for name in part.split()
}
# These limits count the lines that a module reaches by imports, including imports
# inside functions, but for the layer that the record of a mixer (`kind.py`) imports to
# make it: a config needs records, and only a model needs layers. Lower a limit when a
# change allows it; raise it only for something that users get.
MAX_REACHED_LINES = {
    "model.gpt": 4_350,
    "train.core.step": 6_710,
    "train.core.program": 7_210,
    "train.core.loop": 11_030,
    "train.start": 24_000,
}
MAX_CONFIG_TAKERS = 20  # functions that take the whole config; this may only fall too
MAX_CORE_LINES = 9_950  # with the dataclasses of the config
CORE = ("model", "train.core")
# The core imports only itself, the config's dataclasses, the batch type and its shapes,
# and these modules that write to the terminal or end the program.
CORE_MAY = (*CORE, "train.config", "data.config", "data.batch", "data.phases")
CORE_MAY += ("train.console", "train.errors", "train.units", "data.errors")
PARTS = ("model.parts", "model.catalog", "model.mixer_catalog", "train.optimizers")
PARTS += ("train.losses",)
# What only a catalog brings does not count for these modules.
WITHOUT_CATALOGS = ("train.start",)
# Code outside these folders imports only their PUBLIC_MODULES (see `__init__.py`).
ROOMS = ("data", "train.run", "train.plan", "train.prove", "train.distributed")
COMMANDS = LAYERS.strip().split("\n")[-2].split()
# The launcher knows the words of the command line: keys, exit codes, machine names.
LAUNCH_MAY = ("launch", "train.config", "train.errors", "train.cli", "train.hardware")
LAUNCH_MAY += ("train.identity", "train.run.folder", "train.liveness")
LAUNCH_MAY += ("data.errors", "data.names", "data.storage", "data.key_value_store")
LAUNCH_MAY += ("data.program", "train.own_parts")
LAUNCH_MAY += ("train.records", "train.masking", "train.distributed.messages")
# The model may import only these packages, the type of a mistake in a config, and the
# standard library.
MODEL_MAY = {"jax", "flax", "numpy", "jaxtyping", "annotated_types", "model"}
MODEL_MAY |= {"typing_extensions"}
MODEL_MAY_NAMES = {"data.errors.Mistake"}
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
    for package in ("train", "model", "data", "launch", "longhaul"):
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
                packages = MODEL_MAY | sys.stdlib_module_names
                names = all_imported - MODEL_MAY_NAMES
                others = {name for name in names if name.split(".")[0] not in packages}
                assert not others, f"{module} imports {others}"
            if module.startswith(NO_JAX) and layer not in COMMANDS:
                assert not top_level & HEAVY, module


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """Return the files of the product, by module."""
    by_module = dict[str, Path]()
    for package in ("train", "model", "data", "launch", "longhaul"):
        for path in (REPOSITORY / package).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            by_module[".".join(parts).removesuffix(".__init__")] = path
    return by_module


def reached_from(
    files: dict[str, Path], start: str, through_catalogs: bool = True
) -> set[str]:
    """Return the modules that a module imports, directly and indirectly."""
    reached = set[str]()
    queue = [start]
    while queue:
        module = queue.pop()
        if module in reached:
            continue
        reached.add(module)
        if module.endswith("catalog") and not through_catalogs:
            continue
        for name in imports(files[module], not module.endswith(".kind")):
            queue += {name, name.rpartition(".")[0]} & files.keys()
    return reached


@pytest.mark.parametrize(("start", "limit"), MAX_REACHED_LINES.items())
def test_a_module_reaches_at_most_its_limit_of_lines(files, start, limit):
    reached = reached_from(files, start, start not in WITHOUT_CATALOGS)
    lines = sum(files[name].read_text().count("\n") for name in reached)
    assert lines <= limit, f"{start} reaches {lines} lines in {len(reached)} modules"


def is_core(module: str) -> bool:
    return module.startswith(CORE) and not module.startswith(PARTS)


def test_the_core_is_closed_under_import(files):
    """Optional parts are handed to the core as values."""
    for module, path in files.items():
        if is_core(module):
            ours = {name for name in imports(path) if layer_name(name)}
            others = {name for name in ours if not name.startswith(CORE_MAY)}
            others |= {name for name in ours if name.startswith(PARTS)}
            assert not others, f"{module} imports {others}"


def test_the_core_and_its_config_stay_small_enough_to_be_read(files):
    counts = {
        module: path.read_text().count("\n")
        for module, path in files.items()
        if is_core(module) or module.startswith("train.config")
    }
    assert sum(counts.values()) <= MAX_CORE_LINES


def test_few_functions_take_the_whole_config(files):
    """Other functions take the sections or the records that they need."""
    takers = {
        f"{module}.{node.name}, line {node.lineno}"
        for module, path in files.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs)
        if argument.annotation is not None
        and ast.unparse(argument.annotation).strip("'") == "Config"
    }
    assert len(takers) <= MAX_CONFIG_TAKERS, takers


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_entered_by_its_public_modules(files, room):
    """Every import from outside is listed, and everything listed has such an import."""
    public = set(public_modules(files, room))
    used = set[str]()
    for module, path in files.items():
        if module != room and not module.startswith(f"{room}."):
            names = {name for name in imports(path) if name.startswith(f"{room}.")}
            imported = {module_of(files, name) for name in names}
            assert imported <= public, f"{module} imports {imported - public}"
            used |= imported
    assert used == public, f"no module outside {room} imports {public - used}"


def public_modules(files: dict[str, Path], package: str) -> Iterator[str]:
    """Yield the public modules of a package, and those of its public packages."""
    for name in importlib.import_module(package).PUBLIC_MODULES:
        module = f"{package}.{name}"
        if files[module].name == "__init__.py":
            yield from public_modules(files, module)
        else:
            yield module


def module_of(files: dict[str, Path], name: str) -> str:
    """Return the module that an imported name is or belongs to."""
    return name if name in files else name.rpartition(".")[0]


@pytest.mark.parametrize("room", ["train.optimizers", "train.losses"])
def test_only_their_catalog_knows_the_parts_of_a_room(files, room):
    for module, path in files.items():
        if not module.startswith((room, "longhaul.")):  # which offers them to users
            names = {name for name in imports(path) if name.startswith(room)}
            assert all(name.startswith(f"{room}.catalog") for name in names), module


def test_a_step_knows_no_config(files):
    """A step takes a `Recipe`. Of the configs it knows only that of the model."""
    configs = ("train.config", "data.config", "train.cli")
    reached = reached_from(files, "train.core.step")
    assert not {module for module in reached if module.startswith(configs)}


def test_a_reader_of_stores_reaches_no_reader_of_text(files):
    """The catalog of data hands the encoding of text to whoever opens stores."""
    text = ("data.text", "data.catalog")
    reached = reached_from(files, "data.sources", through_catalogs=False)
    assert not {module for module in reached if module.startswith(text)}


def test_a_match_with_a_missing_case_is_an_error():
    """`case _` calls `assert_never`, so that a type checker finds what is missing."""
    for package in ("model", "data", "train", "launch", "longhaul"):
        for path in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                is_case = isinstance(node, ast.match_case) and node.guard is None
                if is_case and ast.unparse(node.pattern) == "_":
                    body = "\n".join(map(ast.unparse, node.body))
                    assert body.startswith("assert_never("), f"{path}: {body}"
