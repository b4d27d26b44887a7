"""A `gcloud` that simulates Cloud TPU's queued resources on this machine.

Its state is in the folder that FAKE_GCLOUD names:

    plan.json     for each creation, the states that `describe` finds one after the
                  other, for example `FAILED 8 why`; with `!why`, create itself fails
    state.json    the resources that exist
    calls.jsonl   the arguments of each call
    vm/<name>/    the home of each VM; its processes have FAKE_VM=<name>
    bin/          the folder that is first on the VMs' PATH
    offline       while this file exists, ssh and scp fail
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOSTS = {"v4-16": 2, "v6e-8": 1, "v5litepod-16": 4}


def main(argv: list[str]) -> int:
    folder = Path(os.environ["FAKE_GCLOUD"])
    with (folder / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(argv) + "\n")
    verb = argv[3]
    words = [word for word in argv[4:] if not word.startswith("-")]
    options = [word.partition("=") for word in argv[4:] if word.startswith("-")]
    flags = {flag: value for flag, _, value in options}
    return VERBS[verb](folder, words, flags)


def _error(verb: str, why: str) -> int:
    group = "gcloud.compute.tpus.queued-resources"
    print(f"ERROR: ({group}.{verb}) {why}", file=sys.stderr)
    return 1


@contextmanager
def state_of(folder: Path) -> Iterator[dict]:
    """Read the state under a lock, and write it back afterwards."""
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = folder / "state.json"
        state = json.loads(file.read_text()) if file.exists() else {}
        yield state
        file.write_text(json.dumps(state))


def _create(folder: Path, words: list[str], flags: dict[str, str]) -> int:
    name = words[0]
    plan = json.loads((folder / "plan.json").read_text())
    count = int(flags.get("--node-count", 0))
    with state_of(folder) as state:
        if name in state:
            return _error("create", "ALREADY_EXISTS: Resource already exists")
        creations = state.setdefault("#made", 0)
        state["#made"] += 1
        states = plan[min(creations, len(plan) - 1)]
        if states[0].startswith("!"):
            return _error("create", states[0][1:])
        prefix = flags.get("--node-prefix", name)
        nodes = [f"{prefix}-{n}" for n in range(count)] or [flags["--node-id"]]
        hosts = _HOSTS[flags["--accelerator-type"]]
        state[name] = {"states": states, "nodes": nodes, "hosts": hosts}
    print(f"Created queued resource [{name}].", file=sys.stderr)
    return 0


def _describe(folder: Path, words: list[str], flags: dict[str, str]) -> int:
    name = words[0]
    with state_of(folder) as state:
        if name not in state:
            return _error("describe", f"NOT_FOUND: Resource '{name}' was not found")
        resource = state[name]
        now, *later_states = resource["states"]
        resource["states"] = later_states or [now]
        word, _, why = now.partition(" ")
        state_fields = {"state": word}
        if word == "FAILED":
            code, _, why = why.partition(" ")
            state_fields["failedData"] = {"error": {"code": int(code), "message": why}}
        if word == "SUSPENDED":
            state_fields["stateInitiator"] = "SERVICE"
        resource["now"] = word
        description = {"name": name, "state": state_fields}
    print(json.dumps(description))
    return 0


def _delete(folder: Path, words: list[str], flags: dict[str, str]) -> int:
    name = words[0]
    with state_of(folder) as state:
        if name not in state:
            return _error("delete", f"NOT_FOUND: Resource '{name}' was not found")
        if "--force" not in flags and state[name]["now"] == "ACTIVE":
            return _error("delete", "FAILED_PRECONDITION: it has nodes")
        for vm in _vms(state[name]):
            end_vm(folder, vm)
        del state[name]
    return 0


def _vms(resource: dict) -> list[str]:
    hosts = range(resource["hosts"])
    return [f"{node}-w-{n}" for node in resource["nodes"] for n in hosts]


def end_vm(folder: Path, vm: str) -> None:
    """Remove a VM, with its processes and its files."""
    marks = f"FAKE_VM={vm}\0".encode(), f"FAKE_GCLOUD={folder}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
            if all(mark in environment for mark in marks):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue
    shutil.rmtree(folder / "vm" / vm, ignore_errors=True)


def preempt(folder: Path, name: str) -> None:
    """Preempt all VMs of a resource, as happens to spot machines."""
    with state_of(folder) as state:
        state[name]["states"] = ["SUSPENDING", "SUSPENDED"]
        state[name]["now"] = "SUSPENDING"
        for vm in _vms(state[name]):
            end_vm(folder, vm)


def _chosen(folder: Path, name: str, flags: dict[str, str]) -> list[str] | None:
    """Return the VMs that a command is for, or None if they cannot be reached."""
    with state_of(folder) as state:
        resource = state.get(name)
    if resource is None or resource.get("now") != "ACTIVE":
        return None
    if (folder / "offline").exists():
        return None
    vms = _vms(resource)
    if flags.get("--node") == "0" and flags.get("--worker") == "0":
        return vms[:1]
    assert flags["--node"] == flags["--worker"] == "all"
    return vms


def _ssh(folder: Path, words: list[str], flags: dict[str, str]) -> int:
    vms = _chosen(folder, words[0], flags)
    codes = [0]
    if vms is None:
        return _error("ssh", "[/usr/bin/ssh] exited with return code [255].")
    for vm in vms:
        home = folder / "vm" / vm
        home.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "HOME": str(home), "FAKE_VM": vm}
        env["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
        # The real gcloud splits the command at spaces too, and ssh joins it again.
        line = " ".join(flags["--command"].split(" "))
        codes.append(subprocess.run(["bash", "-c", line], cwd=home, env=env).returncode)
    return max(codes)


def _scp(folder: Path, words: list[str], flags: dict[str, str]) -> int:
    *files, target = words
    name, _, path = target.partition(":")
    vms = _chosen(folder, name, flags)
    if vms is None:
        return _error("scp", "Could not SSH into the instance.")
    for vm in vms:
        for file in files:
            shutil.copy(file, folder / "vm" / vm / path)
    return 0


VERBS = {
    **{"create": _create, "describe": _describe, "delete": _delete},
    **{"ssh": _ssh, "scp": _scp},
}

_UNAME = '#!/bin/sh\n[ "$*" = -n ] && exec echo "$FAKE_VM"\nexec /usr/bin/uname "$@"\n'


def install(folder: Path, plan: list[list[str]]) -> Path:
    """Make the folder, and return the one that must be first on the PATH."""
    from tests.launch.hostile import program  # the fake itself runs without packages

    (folder / "vm").mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    program(
        folder / "path/gcloud", f'#!/bin/sh\nexec {sys.executable} -S {__file__} "$@"\n'
    )
    program(folder / "bin/uname", _UNAME)
    return folder / "path"


def calls(folder: Path) -> list[list[str]]:
    """Return the arguments of each call so far."""
    file = folder / "calls.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def resources(folder: Path) -> list[str]:
    """Return the names of the existing resources, which would cost money."""
    with state_of(folder) as state:
        return [name for name in state if not name.startswith("#")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
