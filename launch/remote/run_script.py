"""`run.sh`: trains on a host, apart from the connection that asked for it.

It lies in a folder of the host's own, with what it knows of each process:

    process-<n>/lock    held as long as anything of it lives
    process-<n>/pid     of training, or of what is set up before
    process-<n>/code    its exit code, as a shell has it; there only when it has ended
    process-<n>/log     what the last start said

Every value is quoted, and none is on a command line but the overrides of training. A
broken connection ends nothing: the process has a session of its own.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launch.job import exports, shell

RUN = "run.sh"


class State(NamedTuple):
    """What a process is doing: `running`, `ended` with a code, or `lost` without one.

    `told`: it got the signal.
    """

    word: str
    code: int | None = None


def folder_of(name: str) -> str:
    """Return the folder on the host, from the user's home on."""
    return f"longhaul/{name}"


def run_script(
    command: Sequence[str],
    environment: Mapping[str, str],
    secrets: Sequence[str] = (),
    setup: Sequence[str] = (),
    workdir: str | None = None,
    last: Sequence[str] = (),
) -> str:
    """Return the text of run.sh.

    Args:
        command: the words that train.
        environment: variables.
        secrets: lines of shell that fetch others, and fail where they cannot.
        setup: lines of shell, in the same shell as the command.
        workdir: where it runs; None: in the folder of run.sh.
        last: lines of shell right before the command.
    """
    where = [] if workdir is None else [f"cd -- {shlex.quote(workdir)}"]
    body = [*exports(environment), *secrets, *setup, *where, *last]
    body.append(f"exec {shell(command)}")
    return _SCRIPT.replace("@BODY@", "\n".join(body))


def run_words(name: str, verb: str, *words: str | int) -> str:
    """Return the command that a shell of the host is told."""
    return shell(["bash", f"{folder_of(name)}/{RUN}", verb, *map(str, words)])


def read_states(said: str) -> dict[str, State]:
    """Read what run.sh said of its processes, by `host:process`."""
    pattern = r"^longhaul (\S+) (running|ended|lost|told) ?(\d*)\r?$"
    return {
        name: State(word, int(code) if code else None)
        for name, word, code in re.findall(pattern, said, re.MULTILINE)
    }


# setsid --fork, and not `&`, with which a shell has its children ignore SIGINT. All
# verbs end with 0: what is to be known is what they say.
_SCRIPT = r"""#!/usr/bin/env bash
# One run on this host. FIRST and COUNT: its processes here, by number.
#   run.sh start FIRST COUNT [WORLD_SIZE ADDRESS PORT]   instead of what runs
#   run.sh poll FIRST COUNT
#   run.sh signal FIRST COUNT NAME
#   run.sh said FIRST BYTES      what FIRST has said, without so many bytes
#   run.sh tail FIRST COUNT CODE the last lines of those that ended with this code
set -u
cd -- "$(dirname -- "$0")" || exit 1

train() {
trap 'echo "a line before training failed" >&2; exit 1' ERR
@BODY@
}

place() { # PROCESS FIRST COUNT [WORLD_SIZE ADDRESS PORT]
  if [ "${4-1}" != 1 ]; then
    export RANK="$1" LOCAL_RANK="$(($1 - $2))" LOCAL_WORLD_SIZE="$3"
    export WORLD_SIZE="$4" MASTER_ADDR="$5" MASTER_PORT="$6"
  fi
}

one() { # PROCESS FIRST COUNT [WORLD_SIZE ADDRESS PORT]
  (
    trap 'exit 130' INT # until training takes over
    trap 'exit 42' TERM
    echo "$BASHPID" >"process-$1/pid"
    place "$@"
    train
  )
  echo "$?" >"process-$1/code.new"
  mv "process-$1/code.new" "process-$1/code"
}

start() { # FIRST COUNT [WORLD_SIZE ADDRESS PORT]
  local process
  for ((process = $1; process < $1 + $2; process++)); do
    mkdir -p "process-$process"
    locked "$process" && kill_group "$process"
    exec 9>"process-$process/lock"
    flock -w 20 9 || continue
    rm -f "process-$process"/{code,pid,group}
    setsid --fork bash ./run.sh one "$process" "$@" \
      </dev/null >"process-$process/log" 2>&1
    exec 9>&-
    say "$process" running
  done
}

poll() { # FIRST COUNT
  local process held
  for ((process = $1; process < $1 + $2; process++)); do
    held=no
    locked "$process" && held=yes
    if [ -s "process-$process/code" ]; then
      say "$process" "ended $(cat "process-$process/code")"
    elif [ "$held" = yes ]; then
      say "$process" running
    else
      say "$process" lost
    fi
  done
}

signal() { # FIRST COUNT NAME
  local process pid wait
  for ((process = $1; process < $1 + $2; process++)); do
    locked "$process" || continue
    for wait in 1 2 3 4 5 6 7 8 9 10; do
      [ -s "process-$process/pid" ] || sleep 0.2
    done
    pid=$(cat "process-$process/pid")
    # What runs by sudo, docker for one, is not ours to signal.
    kill -s "$3" "$pid" 2>/dev/null || sudo -n kill -s "$3" "$pid"
    say "$process" told
  done
}

said() { tail -c "+$(($2 + 1))" "process-$1/log"; }

tail_of() { # FIRST COUNT CODE
  local process
  for ((process = $1; process < $1 + $2; process++)); do
    if [ "$(cat "process-$process/code" 2>/dev/null)" = "$3" ]; then
      tail -n 20 "process-$process/log" | sed "s/^/$(uname -n):$process: /"
    fi
  done
}

say() { echo "longhaul $(uname -n):$1 $2"; }

locked() { [ -e "process-$1/lock" ] && ! flock -n "process-$1/lock" true; }

kill_group() {
  local pid
  for pid in $(cat "process-$1/group" "process-$1/pid" 2>/dev/null); do
    kill -s KILL -- "-$pid" 2>/dev/null || kill -s KILL "$pid" 2>/dev/null
  done
}

case "$1" in
one)
  shift
  echo "$$" >"process-$1/group"
  one "$@"
  ;;
start | poll | signal | said) "$@" ;;
tail) shift && tail_of "$@" ;;
esac
exit 0
"""
