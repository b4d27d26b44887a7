"""Imports run one way, and say what each package may know."""

import ast
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# A module of train/ imports only what stands above it. The way to read train/.
ORDER = [
    *("exits", "config"),
    *("identity", "rules", "quoting", "schema", "flags", "check", "command"),
    *("detection", "rollcall", "cluster", "requests"),
    *("chips", "targets", "flops", "runtime", "mesh", "topology"),
    *("sharding", "optimizer", "spikes", "state"),
    *("loss", "step", "replicas"),
    *("program", "aot", "feed", "evaluation", "generate", "drill"),
    *("hlo", "loops", "accesses", "work", "groups", "serves", "traffic"),
    *("share", "residuals", "temporaries", "movements", "effort", "exchanges"),
    *("versions", "object_store", "progress"),
    *("achievable", "links", "describe", "ledger", "execution", "estimate"),
    *("prediction", "roofline", "scaling", "advice", "relief", "outlook"),
    *("layouts", "found", "search"),
    "preflight",
    *("appenders", "lines", "metrics", "goodput", "timeline", "charts"),
    *("page", "report"),
    *("tracker", "owner", "lease", "rundir"),
    *("digests", "orbax_log", "orbax_s3", "checkpoint", "watcher", "watchdog"),
    *("summary", "trained", "window", "loop"),
    *("rates", "layer_timeline", "lanes", "layout", "layout_grid"),
    *("memory_bar", "execution_tables", "picture"),
]
DOORS = {
    *("train.__main__", "train.plan", "train.evaluate", "train.sample"),
    *("train.checkpoints", "train.status"),
    *("data.prepare", "data.inspect", "data.verify", "data.train_tokenizer"),
    "launch.__main__",
}
MODEL_MAY = {"jax", "flax", "numpy", "jaxtyping", "model"}
# The words of the command line: keys, exit codes, names of machines.
LAUNCH_MAY = {f"train.{name}" for name in ("config", "exits", "quoting", "targets")}
DATA_MAY_NOT = {"jax", "jaxlib", "flax", "optax", "orbax", "model", "train"}


def modules(package: str) -> dict[str, Path]:
    folder = REPOSITORY / package
    return {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path
        for path in sorted(folder.rglob("*.py"))
        if path.name != "__init__.py"
    }


def imports(path: Path) -> set[str]:
    """Give the modules imported anywhere in a file, `train.config` for either form."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


ALL = {
    name: path
    for package in ("train", "model", "data", "launch")
    for name, path in modules(package).items()
}


def test_inside_train_imports_run_one_way():
    names = [f"train.{name}" for name in ORDER]
    inside = [name for name in modules("train") if name not in DOORS]
    assert sorted(names) == sorted(inside), "give a new module its place in ORDER"
    for position, name in enumerate(names):
        later = imports(ALL[name]) & {*names[position:]}
        assert not later, f"{name} imports {later}, which ORDER puts behind it"


def test_nothing_imports_a_door():
    for name, path in ALL.items():
        assert not imports(path) & DOORS, name


@pytest.mark.parametrize("package", ["model", "data", "launch"])
def test_packages_know_only_what_they_may(package):
    for name, path in modules(package).items():
        tops = {module.partition(".")[0] for module in imports(path)}
        known = tops & {"train", "model", "data", "launch", "tests"}
        if package == "model":
            assert tops <= MODEL_MAY | sys.stdlib_module_names, name
        elif package == "data":
            of_doors = {"train"} if name in DOORS else set()
            assert not tops & DATA_MAY_NOT - of_doors, name
            assert known <= {"data"} | of_doors, name
        elif name not in DOORS:
            assert known <= {"launch", "train"}, name
            inside = {m for m in imports(path) if m.startswith("train.")}
            assert {".".join(m.split(".")[:2]) for m in inside} <= LAUNCH_MAY, name


def test_train_does_not_know_launch():
    for name, path in modules("train").items():
        assert not {m for m in imports(path) if m.split(".")[0] == "launch"}, name


def test_there_are_no_cycles():
    graph = {name: imports(path) & set(ALL) for name, path in ALL.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
