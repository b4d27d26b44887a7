# Make one attempt, and decide what follows. The lines above set the commands (srun,
# srun_one, train, status), tasks, the paths (folder, diary, stop), the nodes that the
# user excludes (exclude), whether the user selects nodes (chosen), and the policy
# (launch/slurm/script.py writes these lines).

say() { printf '%s  %s\n' "$(date '+%F %T')" "$*" >&2; }

diary_line() { # verdict, whether it is the last attempt, the step
	local codes
	printf -v codes ', %s' "${exit_codes[@]}"
	printf '{"began": %d, "ended": %d, "codes": [%s], ' "$began" "$(date +%s)" "${codes:2}"
	printf '"verdict": "%s", "over": %s, "step": %s}\n' "$1" "$2" "${3:-null}"
}

finish() { # verdict, exit code, message, step
	diary_line "$1" true "${4:-null}" >>"$diary"
	say "$3"
	exit "$2"
}

# Puts this job back into the queue. With $1, it starts after that number of seconds.
requeue() {
	local avoid changed=
	avoid=$(nodes_to_avoid) && changed=yes
	if ! scontrol requeue "$SLURM_JOB_ID"; then
		say "Slurm does not take the job back: submit it again with action=resume"
		exit "$code"
	fi
	[[ -z ${1-} ]] || scontrol update "JobId=$SLURM_JOB_ID" "StartTime=now+$1"
	[[ -z $changed ]] || scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$avoid"
	exit "$code" # Slurm ends the script of a requeued job anyway
}

# Prints the state of this job: running, cancelled, put_back (requeued by Slurm or by
# this script), or cut_off. A job is cut off by a time limit, or by a preemption that
# cancels jobs (PreemptMode=CANCEL). Then only this script can requeue it.
fate() {
	local job
	job=$(scontrol show job --oneliner "$SLURM_JOB_ID")
	if [[ ! $job =~ JobState=([A-Z_]+) || ${BASH_REMATCH[1]} == RUNNING ]]; then
		echo running
	elif [[ $job =~ Restarts=([0-9]+) ]] &&
		((BASH_REMATCH[1] > ${SLURM_RESTART_COUNT:-0})); then
		echo put_back
	elif [[ $job =~ " "(Reason=TimeLimit" "|PreemptTime=[0-9]) ]]; then
		echo cut_off
	else
		echo cancelled
	fi
}

# Handles SIGTERM, which Slurm sends to the processes and to this script before it kills
# them. So the script requeues the job at once, and then waits for the save. If it first
# waited for a long save, Slurm would kill it before it could requeue the job.
put_back_in_time() {
	trap '' TERM # another SIGTERM would end scontrol
	if [[ ! -e $stop && $(fate) == cut_off ]] && scontrol requeue "$SLURM_JOB_ID"; then
		say "Slurm is about to end this job: it is in the queue again; saves, if it can"
	fi
	trap put_back_in_time TERM
}

has_ended_with() { [[ " ${exit_codes[*]} " == *" $1 "* ]]; }

# Sets verdict and code from exit_codes.
judge() {
	for code in "${never_again[@]}"; do
		verdict=stop
		has_ended_with "$code" && return
	done
	for code in "${exit_codes[@]}"; do
		verdict=crashed
		[[ " 0 ${again[*]} " == *" $code "* ]] || return
	done
	for code in "${exit_codes[@]}"; do
		verdict=again
		((code)) && return
	done
	verdict=done code=0
}

# Prints the run's newest step; nothing if that is unknown.
step_of_run() {
	local output
	output=$("${srun_one[@]}" "${status[@]}") || return
	[[ $output =~ \"step\":\ ([0-9]+) ]] && echo "${BASH_REMATCH[1]}"
}

crashes() { grep '"verdict": "crashed"' "$diary" 2>/dev/null; }

is_crash() { [[ " 0 ${never_again[*]} ${again[*]} " != *" $1 "* ]]; }

# Prints the nodes that the next attempt excludes: those that the user excludes and, if
# all crashes were on one node, this node. Fails if the nodes to exclude do not change.
# Also fails if the partition has no spare node, because the job would wait for ever.
nodes_to_avoid() {
	local file code node spare
	local -A crashed=()
	for file in "$folder/nodes"/*; do
		code=$(cat "$folder/codes/${file##*/}" 2>/dev/null) || code=$srun_code
		node=$(<"$file")
		! is_crash "$code" || crashed[$node]=1
	done
	if ((${#crashed[@]} != 1 || ${SLURM_JOB_NUM_NODES:-1} < 2)); then
		[[ -e $folder/avoided ]] && rm "$folder/avoided" && echo "$exclude"
		return
	fi
	node=${!crashed[*]}
	spare=$(sinfo --noheader --Node --responding --format=%N \
		--states=idle,alloc,mix,comp "--partition=$SLURM_JOB_PARTITION" | sort -u |
		grep -cvxF "$([[ -z $exclude ]] || scontrol show hostnames "$exclude")")
	if ((chosen || spare <= SLURM_JOB_NUM_NODES)); then
		say "processes crashed on $node alone; no other node could take its place"
		return 1
	fi
	say "processes crashed on $node alone: the next attempt is without it"
	touch "$folder/avoided"
	echo "${exclude:+$exclude,}$node"
}

# Sets exit_codes. If a process left no file with its code, it was killed together with
# its shell, and the exit code of srun is used instead.
attempt() {
	rm -rf "$folder/codes" "$folder/nodes"
	mkdir -p "$folder/codes" "$folder/nodes"
	# shellcheck disable=SC2016 # the shells on the nodes expand these
	local shell='trap : TERM INT USR1 USR2; folder=$1; shift
		echo "$SLURMD_NODENAME" >"$folder/nodes/$SLURM_PROCID"; "$@"; code=$?
		echo "$code" >"$folder/codes/$SLURM_PROCID"; exit "$code"'
	trap put_back_in_time TERM
	"${srun[@]}" sh -c "$shell" sh "$folder" "${train[@]}" &
	local pid=$! file
	# A signal ends `wait` early. Only a `wait` after the end of srun returns srun's code.
	wait "$pid"
	while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
	wait "$pid"
	srun_code=$?
	trap : TERM
	exit_codes=()
	for file in "$folder/codes"/*; do
		[[ -s $file ]] && exit_codes+=("$(<"$file")")
	done
	((${#exit_codes[@]} == tasks)) || exit_codes+=("$srun_code")
}

trap : TERM INT HUP USR1 USR2 CONT # the processes get these too: wait for their end
if [[ -e $stop ]]; then
	say "asked to stop: does not start"
	exit "$stopped"
fi
began=$(date +%s)
attempt
judge

# If Slurm has requeued or cancelled an unfinished job, the verdict has no effect.
if [[ $verdict != done ]]; then
	case $(fate) in
	put_back)
		diary_line again false >>"$diary"
		say "ended with ${exit_codes[*]}, which is not counted: Slurm starts it again"
		exit "$code"
		;;
	cancelled) finish stop "$code" "ended with ${exit_codes[*]}: Slurm has cancelled the job" ;;
	esac
fi
case $verdict in
done) finish done 0 "finished" ;;
stop) finish stop "$code" "ended with $code: not again" ;;
esac
[[ ! -e $stop ]] || finish stop "$code" "ended with $code, and was asked to stop"
if [[ $verdict == again ]]; then
	diary_line again false >>"$diary"
	say "ended with $code, which is not counted: starting again"
	requeue
fi
step=$(step_of_run) || step=null
crashes_here=$(crashes | tail -n $((same_step - 1)) | grep -c "\"step\": $step}")
number=$(($(crashes | wc -l) + 1))
if [[ $step != null ]] && ((crashes_here == same_step - 1)); then
	finish crashed "$crashes_again" "crashed $same_step times at step $step: not again" "$step"
fi
if ((number > max_restarts)); then
	finish crashed "$code" "crashed with $code, one time more than \
cluster.max_restarts=$max_restarts allows" "$step"
fi
last=$((number < ${#pauses[@]} ? number : ${#pauses[@]}))
pause=${pauses[last - 1]}
diary_line crashed false "$step" >>"$diary"
say "crashed with $code ($number of $max_restarts): starting again in $pause s"
requeue "$pause"
