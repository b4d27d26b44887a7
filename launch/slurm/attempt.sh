# One attempt, and what follows from it. Above: srun, srun_one, train and status, the
# words of commands; tasks; folder, diary and stop, where things lie; exclude, the nodes
# that the user does not want; chosen, whether some are asked for; and the policy.

say() { printf '%s  %s\n' "$(date '+%F %T')" "$*" >&2; }

# Gives a line of the diary: verdict, whether it is the last attempt, the step.
note() {
	local codes
	printf -v codes ', %s' "${found[@]}"
	printf '{"began": %d, "ended": %d, "codes": [%s], ' "$began" "$(date +%s)" "${codes:2}"
	printf '"verdict": "%s", "over": %s, "step": %s}\n' "$1" "$2" "${3:-null}"
}

finish() { # verdict, exit code, what to say, the step
	note "$1" true "${4:-null}" >>"$diary"
	say "$3"
	exit "$2"
}

# Puts this job back into the queue; not before so many seconds, if told.
again() {
	local avoid changed=
	avoid=$(nodes_to_avoid) && changed=yes
	if ! scontrol requeue "$SLURM_JOB_ID"; then
		say "Slurm does not take the job back: submit it again with action=resume"
		exit "$code"
	fi
	[[ -z ${1-} ]] || scontrol update "JobId=$SLURM_JOB_ID" "StartTime=now+$1"
	[[ -z $changed ]] || scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$avoid"
	exit "$code" # Slurm ends this script anyway
}

# Says what becomes of this job: it is running; it was put_back by Slurm, or by us before
# its end; it was cut_off by a time limit, or for a job of a higher priority where that
# cancels (PreemptMode), and to put it back is ours; it was cancelled.
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

# Called by a SIGTERM: of those that Slurm means to kill, a while later, if they have not
# ended. This script is among them, so it puts the job back at once, and waits on: a save
# that takes longer must not be the end of the run.
put_back_in_time() {
	trap '' TERM # one more would end scontrol
	if [[ ! -e $stop && $(fate) == cut_off ]] && scontrol requeue "$SLURM_JOB_ID"; then
		say "Slurm is about to end this job: it is in the queue again; saves, if it can"
	fi
	trap put_back_in_time TERM
}

found_one() { [[ " ${found[*]} " == *" $1 "* ]]; }

# Sets verdict and code from what was found.
judge() {
	for code in "${never_again[@]}"; do
		verdict=stop
		found_one "$code" && return
	done
	for code in "${found[@]}"; do
		verdict=crashed
		[[ " 0 ${again[*]} " == *" $code "* ]] || return
	done
	for code in "${found[@]}"; do
		verdict=again
		((code)) && return
	done
	verdict=done code=0
}

# Says how far the run is; nothing if it cannot be asked.
step_of_run() {
	local said
	said=$("${srun_one[@]}" "${status[@]}") || return
	[[ $said =~ \"step\":\ ([0-9]+) ]] && echo "${BASH_REMATCH[1]}"
}

crashes() { grep '"verdict": "crashed"' "$diary" 2>/dev/null; }

is_crash() { [[ " 0 ${never_again[*]} ${again[*]} " != *" $1 "* ]]; }

# Says which nodes the next attempt is to be without: the user's, and the one on which
# processes have crashed while none did elsewhere. Fails where nothing is to change, and
# where the partition has no node to spare: the job would wait for ever.
nodes_to_avoid() {
	local file code node spare
	local -A crashed=()
	for file in "$folder/nodes"/*; do
		code=$(cat "$folder/codes/${file##*/}" 2>/dev/null) || code=$highest
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

# Leaves codes of processes in files: without one it was killed with its shell.
attempt() {
	rm -rf "$folder/codes" "$folder/nodes"
	mkdir -p "$folder/codes" "$folder/nodes"
	# shellcheck disable=SC2016 # for the shells there
	local shell='trap : TERM INT USR1 USR2; folder=$1; shift
		echo "$SLURMD_NODENAME" >"$folder/nodes/$SLURM_PROCID"; "$@"; code=$?
		echo "$code" >"$folder/codes/$SLURM_PROCID"; exit "$code"'
	trap put_back_in_time TERM
	"${srun[@]}" sh -c "$shell" sh "$folder" "${train[@]}" &
	local pid=$! file
	# A signal ends a wait: the last one, when it is over, gives the code.
	wait "$pid"
	while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
	wait "$pid"
	highest=$?
	trap : TERM
	found=()
	for file in "$folder/codes"/*; do
		[[ -s $file ]] && found+=("$(<"$file")")
	done
	((${#found[@]} == tasks)) || found+=("$highest")
}

trap : TERM INT HUP USR1 USR2 CONT # the processes hear them too: wait for their ends
if [[ -e $stop ]]; then
	say "asked to stop: does not start"
	exit "$stopped"
fi
began=$(date +%s)
attempt
judge

# What cuts it off leaves it to us. Anything else that ends this job is Slurm's affair.
if [[ $verdict != done ]]; then
	case $(fate) in
	put_back)
		note again false >>"$diary"
		say "ended with ${found[*]}: Slurm starts it again, this does not count"
		exit "$code"
		;;
	cancelled) finish stop "$code" "ended with ${found[*]}: Slurm has cancelled the job" ;;
	esac
fi
case $verdict in
done) finish done 0 "finished" ;;
stop) finish stop "$code" "ended with $code: not again" ;;
esac
[[ ! -e $stop ]] || finish stop "$code" "ended with $code, and was asked to stop"
if [[ $verdict == again ]]; then
	note again false >>"$diary"
	say "ended with $code; again, this does not count"
	again
fi
step=$(step_of_run) || step=null
here=$(crashes | tail -n $((same_step - 1)) | grep -c "\"step\": $step}")
number=$(($(crashes | wc -l) + 1))
if [[ $step != null ]] && ((here == same_step - 1)); then
	finish crashed "$crashes_again" "crashed $same_step times at step $step: not again" "$step"
fi
if ((number > max_restarts)); then
	finish crashed "$code" "crashed with $code; that is once more than \
cluster.max_restarts=$max_restarts" "$step"
fi
last=$((number < ${#pauses[@]} ? number : ${#pauses[@]}))
pause=${pauses[last - 1]}
note crashed false "$step" >>"$diary"
say "crashed with $code ($number of $max_restarts); again in $pause s"
again "$pause"
