# One attempt, and what follows from it. Above: srun, srun_one, train and status, the
# words of commands; tasks; folder, diary and stop, where things lie; and the policy.

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
	if ! scontrol requeue "$SLURM_JOB_ID"; then
		say "Slurm does not take the job back: submit it again with action=resume"
		exit "$code"
	fi
	[[ -z ${1-} ]] || scontrol update "JobId=$SLURM_JOB_ID" "StartTime=now+$1"
	exit "$code" # Slurm ends this script anyway
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

# Leaves codes of processes in files: without one it was killed with its shell.
attempt() {
	rm -rf "$folder/codes"
	mkdir -p "$folder/codes"
	# shellcheck disable=SC2016 # for the shells there
	local shell='trap : TERM INT USR1 USR2; codes=$1; shift; "$@"; code=$?
		echo "$code" >"$codes/$SLURM_PROCID"; exit "$code"'
	"${srun[@]}" sh -c "$shell" sh "$folder/codes" "${train[@]}" &
	local pid=$! file
	# A signal ends a wait: the last one, when it is over, gives the code.
	wait "$pid"
	while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
	wait "$pid"
	local highest=$?
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

# A time limit leaves it to us. Anything else that ends this job is Slurm's affair.
job=$(scontrol show job --oneliner "$SLURM_JOB_ID")
if [[ $job =~ JobState=([A-Z_]+) && ${BASH_REMATCH[1]} != RUNNING &&
	$job != *" Reason=TimeLimit "* && $verdict != done ]]; then
	if [[ $job =~ Restarts=([0-9]+) ]] && ((BASH_REMATCH[1] > ${SLURM_RESTART_COUNT:-0})); then
		note again false >>"$diary"
		say "ended with ${found[*]}: Slurm starts it again, this does not count"
		exit "$code"
	fi
	finish stop "$code" "ended with ${found[*]}: Slurm has cancelled the job"
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
