#!/usr/bin/env bash
# Control the COUNT processes of a run on this host, which are numbered from FIRST.
#   run.sh start FIRST COUNT [WORLD_SIZE ADDRESS PORT]   kills old processes first
#   run.sh poll FIRST COUNT
#   run.sh signal FIRST COUNT NAME
#   run.sh said FIRST BYTES      the output of process FIRST after the first BYTES bytes
#   run.sh tail FIRST COUNT CODE the last lines of processes that ended with CODE
set -u
cd -- "$(dirname -- "$0")" || exit 1

train() {
trap 'echo "a line before training failed" >&2; exit 1' ERR
@BODY@
}

# The file is copied before each start, and is no part of the run's records.
export_secret() {
  [ ! -s @SECRET_FILE@ ] || export @SECRET_VARIABLE@="$(cat @SECRET_FILE@)"
}

export_ranks() { # PROCESS FIRST COUNT [WORLD_SIZE ADDRESS PORT]
  if [ "${4-1}" != 1 ]; then
    export RANK="$1" LOCAL_RANK="$(($1 - $2))" LOCAL_WORLD_SIZE="$3"
    export WORLD_SIZE="$4" MASTER_ADDR="$5" MASTER_PORT="$6"
  fi
}

run_process() { # PROCESS FIRST COUNT [WORLD_SIZE ADDRESS PORT]
  (
    trap 'exit 130' INT # until training sets its own handlers
    trap 'exit 42' TERM
    echo "$BASHPID" >"process-$1/pid"
    export_ranks "$@"
    export_secret
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
    setsid --fork bash ./run.sh run_process "$process" "$@" \
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
  local process pid attempt
  for ((process = $1; process < $1 + $2; process++)); do
    locked "$process" || continue
    for attempt in 1 2 3 4 5 6 7 8 9 10; do
      [ -s "process-$process/pid" ] || sleep 0.2
    done
    pid=$(cat "process-$process/pid")
    # Only sudo may signal a process that runs under sudo, such as docker.
    { kill -s "$3" "$pid" 2>/dev/null || sudo -n kill -s "$3" "$pid"; } &&
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
run_process)
  shift
  echo "$$" >"process-$1/group"
  run_process "$@"
  ;;
start | poll | signal | said) "$@" ;;
tail) shift && tail_of "$@" ;;
esac
exit 0
