"""Draw fuzz cases from a seed: commands, keys, paths and files of a run."""

import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.config import schema_of
from tests.program import module_option
from tests.train.cli import commands
from train.cli.hints import keys_of
from train.config import Config

COMMANDS: Mapping[str, type] = {
    **commands.COMMANDS,
    "train": Config,
    "train.branch": Config,
    "launch": schema_of("local"),
}
ON_A_RUN = (
    "evaluate",
    "sample",
    "export",
    "status",
    "profile",
    "report",
    "checkpoints",
    "prove",
)

_PLAIN_NUMBERS = """
    0 -1 1 2 3 7 1000003 1e3 1.5 -0.0 1e-320 1e308 nan inf -inf 1e999 0x10 1_000 ² ١
    true null
"""
NUMBERS = [
    *_PLAIN_NUMBERS.split(),
    "9" * 30,
    "9" * 5000,
    str(2**31),
    str(2**63),
    str(-(2**63)),
]
_PLAIN_TEXTS = """
    a é 日本 🦓 a,b a=b null None true ~ ... .. . - --help ??? ${seed} ${nothing}
    ${oc.env:X} ${oc.env:HOME,x} ${ { } [ ] ( ) ' # @ a:b * &a !!python/none % < > |
    ; $(x) `x` NaN Infinity
"""
TEXTS = [
    *_PLAIN_TEXTS.split(),
    "e\u0301",
    "",
    " ",
    "a b",
    '"',
    "\\",
    "a: b",
    "\t",
    "\n",
    "\r",
    "\x00",
    "\x1b[31m",
    "\x7f",
    "\u202e",
    "\ufeff",
    "\udcff",
    "x" * 300,
    "é" * 200,
    "x" * 5000,
    "[" * 300,
    "{a:" * 100,
]
_PLAIN_TREES = """
    [] {} [1] [1,2,3] [null] [[]] [[[[1]]]] {a:1} {a:{b:c}} [a,b] {a:[1,{b:2}]}
    [1,a,null,1.5] {'':1} {1:2} {x:1,x:2} [-1] [0] [1e999] {batch:[1,2]} [{match:x}]
    [[0,1]]
"""
TREES = [
    *_PLAIN_TREES.split(),
    "[" * 60 + "]" * 60,
]
_PLAIN_PATHS = """
    {run} {run}/ {run}/.. {run}/../x ./{run} {run}/. {run}// {dir} {dir}/text.txt
    {dir}/nothing {dir}/text.txt/x {dir}/../.. / /dev/null /dev/full /proc/self/mem
    /proc/1 /sys {dir}/fifo {dir}/loop ~ ~x {dir}/socket {dir}/日本 s3:// s3://x gs://
    ftp://x/y http://127.0.0.1:9/x https:// :// file://{dir}/x hf://x
    {run}/config.yaml {dir}/empty {run}/checkpoints {run}/checkpoints/2 {run}@2
    {run}@ {run}@x @ {dir}/broken.json {dir}/broken.yaml {dir}/binary
    {dir}/empty.json
"""
PATHS = [
    *_PLAIN_PATHS.split(),
    "{dir}/" + "x" * 300,
    "{dir}/" + "/".join(["y" * 200] * 30),
    " {dir}",
    "{dir}/ a ",
    "{dir}/a\\b",
    "{dir}/\udcff",
    "{dir}/a\nb",
    "{dir}/a\x00b",
    "s3://a b/c",
]
CONTENTS: Mapping[str, bytes] = {
    "empty": b"",
    "zeros": b"\0" * 5000,
    "binary": bytes(range(256)) * 4,
    "nested": b"[" * 100_000,
    "nested objects": b'{"a":' * 50_000,
    "list": b"[1, 2]\n",
    "null": b"null\n",
    "number": b"12\n",
    "text": b'"text"\n',
    "infinity": b'{"step": Infinity, "a": NaN}\n',
    "huge": b'{"step": 1' + b"0" * 400 + b', "pid": 1' + b"0" * 30 + b"}\n",
    "huge integer": b'{"step": 1' + b"0" * 5000 + b"}\n",
    "half": b'{"step": 1, "lo',
    "wrong types": b'{"step": "x", "run_id": [1], "changes": 3, "start": {}}\n',
    "negative": b'{"step": -5, "start": -1, "time": -1e300, "seconds": -1e308}\n',
    "yaml": b"a: &a [*a]\n",
    "yaml tag": b"!!python/object/apply:os.system ['x']\n",
    "yaml bomb": b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "not utf-8": b"\xff\xfe\xfa name: x\n",
    "surrogate": b'{"run_id": "\\ud800", "step": 2}\n',
    "long line": b"x" * 1_000_000,
    "many lines": b"{}\n" * 5000,
}


@dataclass(frozen=True)
class Case:
    """One start of a command: its words, and the damage to its run before it."""

    words: Sequence[str]
    damage: str = ""
    do: Callable[[Path], object] = lambda run: None


def case_of(seed: int, number: int, folder: Path) -> Case:
    """Return a case whose paths are in `folder`, which `furnish` fills."""
    dice = random.Random(f"{seed}-{number}")
    kind = dice.choices(["keys", "words", "paths", "files"], [5, 2, 3, 5])[0]
    make = {"keys": _keys, "words": _words, "paths": _paths, "files": _files}[kind]
    case = make(dice)
    values_of_names = {"{run}": str(folder / "run"), "{dir}": str(folder)}
    words = [_fill_in(word, values_of_names) for word in case.words]
    return Case(words, case.damage, case.do)


def _fill_in(word: str, values_of_names: Mapping[str, str]) -> str:
    for name, value in values_of_names.items():
        word = word.replace(name, value)
    return word.replace("\0", "")  # no argument can hold a null character


def _base(command: str) -> list[str]:
    """Return the words of a start that does little."""
    words = module_option(command)
    name = command.rpartition(".")[2]
    if name in ON_A_RUN:
        words.append("run.dir={run}")
    if command == "train":
        words += ["run.dir={run}", *SMALL]
    if name == "branch":
        words += ["from={run}@2", "run.dir={dir}/branch"]
    if name in ("plan", "coordinates"):
        words += [*SMALL, "output={dir}/out"]
    if name == "coordinates":
        words += ["widths=[16,32]", "depths=[]", "steps=1"]
    if name == "prepare":
        words += ["input={dir}/text.txt", "output={dir}/store"]
    if name == "train_tokenizer":
        words += ["input={dir}/text.txt", "output={dir}/ranks", "vocab_size=300"]
    if command == "launch":
        words += ["cluster=local", "action=render", "plan_first=false"]
    if name == "export":
        words.append("output={dir}/exported")
    return words


SMALL = (
    "model.num_layers=1",
    "model.num_heads=2",
    "model.embed_dim=16",
    "data=text",
    "data.path={dir}/text.txt",
    "data.cache_dir={dir}/cache",
    "data.sequence_length=16",
    "data.batch_size=2",
    "train.num_steps=2",
    "optimizer=adamw",
    "schedule.warmup_steps=1",
    "eval.final_num_batches=1",
    "checkpoint.save_interval_steps=1",
    "runtime.cpu_devices=1",
    "tracker=none",
)
_LONG_COMMANDS = (
    "train",
    "train.plan",
    "train.branch",
    "train.coordinates",
    "train.prove",
)
# Legal values of these keys make a start long, or make it wait for a network.
_LONG = ("train.num_steps", "vocab_size", "launch", "model.num_layers", "seconds")


def _keys(dice: random.Random) -> Case:
    """Draw keys of a command, with values of all kinds."""
    command = dice.choices([*COMMANDS], [6, 3, *[1] * (len(COMMANDS) - 2)])[0]
    keys = [*keys_of(COMMANDS[command])]
    words = _base(command)
    for _ in range(dice.randint(1, 3)):
        key = dice.choice(keys)
        words.append(f"{key}={dice.choice([*NUMBERS, *TEXTS, *TREES])}")
    long = command in _LONG_COMMANDS or any(key in w for w in words for key in _LONG)
    if long and dice.random() < 0.85:
        words += ["--cfg", "job"]
    return Case(words)


def _words(dice: random.Random) -> Case:
    """Draw words that override no known key: text, unknown keys, groups and flags."""
    command = dice.choice([*COMMANDS])
    words = _base(command)
    groups = ("model", "data", "mesh", "optimizer", "schedule", "experiment", "cluster")
    for _ in range(dice.randint(1, 2)):
        text = dice.choice([*TEXTS, *TREES])
        value = dice.choice([*TEXTS, *NUMBERS])
        group = dice.choice(groups)
        forms = [
            text,
            f"{text}={value}",
            f"+{text}={value}",
            f"~{text}",
            f"++{text}",
            f"{group}={text}",
            f"{group}@{text}={value}",
            f"hydra.{text}={value}",
            f"--{text}",
            f"-{text}",
            f"--config-name={text}",
            f"--config-dir={text}",
            f"--package={text}",
        ]
        words.append(dice.choice(forms))
    return Case([*words, "--cfg", dice.choice(["job", "job", "all", "hydra"])])


def _paths(dice: random.Random) -> Case:
    """Draw paths for the keys that name one."""
    command = dice.choice([*COMMANDS])
    names = ("path", "dir", "output", "input", "from", "name", "init_from", "tokenizer")
    keys = [k for k in keys_of(COMMANDS[command]) if k.rpartition(".")[2] in names]
    words = _base(command)
    for _ in range(dice.randint(1, 2)):
        key = dice.choice(
            [k for k in keys if not k.startswith("runtime")] or ["run.dir"]
        )
        value = dice.choice([*PATHS, *(t for t in TEXTS if len(t) < 400)])
        words = [word for word in words if not word.startswith(f"{key}=")]
        words.append(f"{key}={value}")
    return Case(words)


def _files(dice: random.Random) -> Case:
    """Damage a file of a finished run, and run a command on it."""
    name = dice.choice(ON_A_RUN)
    command = dice.choices(
        ["train", "train.branch", f"train.{name}", "data.inspect"], [3, 1, 6, 1]
    )[0]
    words = _base(command)
    if command == "data.inspect":
        words += ["run.dir={run}", "step=1"]
    number = dice.random()
    content = dice.choice([*CONTENTS])
    action = dice.choice(
        ["write", "write", "write", "cut", "flip", "folder", "delete", "fifo", "loop"]
    )

    def damage(run: Path) -> None:
        files = sorted(file for file in run.rglob("*") if file.is_file())
        candidates = [
            f for f in files if f.suffix in (".json", ".yaml", ".jsonl") or number < 0.1
        ]
        file = candidates[int(number * 1000) % len(candidates)]
        previous = file.read_bytes()
        if action == "cut":
            file.write_bytes(previous[: len(previous) // 2])
        elif action == "flip":
            offset = len(previous) // 3
            file.write_bytes(previous[:offset] + b"\xff" + previous[offset + 1 :])
        elif action == "write":
            file.write_bytes(CONTENTS[content])
        else:
            file.unlink()
        if action == "folder":
            file.mkdir()
        elif action == "fifo":
            os.mkfifo(file)
        elif action == "loop":
            file.symlink_to(file)
        damaged.append(str(file.relative_to(run)))

    damaged: list[str] = []
    return Case(words, f"{action} {content if action == 'write' else ''}", damage)


def furnish(folder: Path, run: Path) -> None:
    """Fill the folder of a case: a copy of a finished run, and the files of PATHS."""
    shutil.copytree(run, folder / "run", symlinks=True)
    (folder / "text.txt").write_text("the cat sat on the mat. " * 400)
    (folder / "empty").mkdir()
    (folder / "broken.json").write_bytes(b'{"a": ')
    (folder / "broken.yaml").write_bytes(b"a: [")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "empty.json").write_bytes(b"")
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to(folder / "loop")
