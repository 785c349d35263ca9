#!/usr/bin/env bash
# Train without a terminal: the run outlives the SSH session that started it. See docs/LONG_JOBS.md.
#
#   scripts/train_detached.sh start [FLAGS OF train_grpo.py]     refuses to start twice
#   scripts/train_detached.sh status                             exit code 0: running, 3: not
#   scripts/train_detached.sh stop                               saved, as by Ctrl-C; waits for the end
#   scripts/train_detached.sh resume [RUN_FOLDER [FLAGS]]        without RUN_FOLDER: the run that was started here last
#   scripts/train_detached.sh log                                follow the log
#
# Process id, lock and log are in runs/detached; VLA_GRPO_DETACHED names another folder: a second job beside the first.
set -euo pipefail
cd "$(dirname "$0")/.."
state=${VLA_GRPO_DETACHED:-runs/detached}
watch_s=20 # a start that fails within this time is reported with its reason

say() { echo "train_detached.sh: $*"; }

refuse() {
    say "$*" >&2
    exit 2
}

# The process holds a lock on its PID file for as long as it lives: unlike its number, which may come to name another
# process, that survives neither a kill -9 nor a reboot.
is_running() { [ -e "$state/pid" ] && ! flock --nonblock --shared "$state/pid" true; }

run_folder() { # [BYTES OF THE LOG TO SKIP]; nothing before the run has a folder
    if [ -e "$state/log" ]; then
        tail -c "+$((${1:-0} + 1))" "$state/log" | sed -n 's/^run folder  *//p' | tail -n 1
    fi
}

is_finished() { # the curves of a run are drawn at its end, after the last record
    [ "$1/report/curves.png" -nt "$1/metrics.jsonl" ]
}

global_step() {
    if [ -s "$1/metrics.jsonl" ]; then
        tail -n 1 "$1/metrics.jsonl" | sed -n 's/.*"global_step": \([0-9]*\).*/\1/p'
    fi
}

start() { # FLAGS OF train_grpo.py; adds to the log
    mkdir -p "$state"
    touch "$state/log"
    is_running && refuse "already running (process $(cat "$state/pid")): stop it first, or set VLA_GRPO_DETACHED"
    exec 9>>"$state/pid"
    flock --timeout 2 9 || refuse "another start is under way"
    local before
    before=$(wc -c <"$state/log")
    setsid nohup .venv/bin/python -u train_grpo.py "$@" </dev/null >>"$state/log" 2>&1 &
    local pid=$!
    echo "$pid" >"$state/pid"
    exec 9>&- # from here on the lock is the process's alone
    local waited=0
    while [ "$waited" -lt "$watch_s" ] && kill -0 "$pid" 2>/dev/null; do
        [ -n "$(run_folder "$before")" ] && break
        sleep 1
        waited=$((waited + 1))
    done
    if ! kill -0 "$pid" 2>/dev/null; then
        local code=0
        wait "$pid" || code=$?
        say "ended with exit code $code: $(tail -n 1 "$state/log")" >&2
        exit "$code"
    fi
    say "started (process $pid), log $state/log"
}

stop() {
    is_running || refuse "nothing is running"
    local pid
    pid=$(cat "$state/pid")
    kill -TERM "$pid"
    say "asked process $pid to stop; waiting for its end"
    flock --shared "$state/pid" true
    local folder
    folder=$(run_folder)
    if [ -n "$folder" ] && [ -e "$folder/checkpoints/latest" ]; then
        say "stopped; newest checkpoint $folder/checkpoints/$(readlink "$folder/checkpoints/latest")"
        say "go on with: scripts/train_detached.sh resume $folder"
    else
        say "stopped before its first checkpoint"
    fi
}

status() {
    local folder code=0
    folder=$(run_folder)
    if is_running; then
        say "running (process $(cat "$state/pid"))"
    else
        say "not running"
        code=3
    fi
    if [ -n "$folder" ]; then say "run folder $folder, global step $(global_step "$folder")"; fi
    if [ -s "$state/log" ]; then say "last line: $(tail -n 1 "$state/log")"; fi
    exit "$code"
}

resume() { # [RUN_FOLDER [FLAGS]]
    local folder=${1:-$(run_folder)}
    [ -n "$folder" ] || refuse "no run was started here; name its folder: resume runs/RUN"
    shift || true
    if [ $# = 0 ] && is_finished "$folder"; then
        say "$folder is finished; to train longer: resume $folder --total-steps N"
        exit 0
    fi
    start --resume "$folder" "$@"
}

verb=${1:-}
shift || true
case $verb in
start)
    mkdir -p "$state"
    is_running || : >"$state/log"
    start "$@"
    ;;
stop) stop ;;
status) status ;;
resume) resume "$@" ;;
log) exec tail -n 50 -f "$state/log" ;;
*) refuse "use one of: start [FLAGS], status, stop, resume [RUN_FOLDER [FLAGS]], log" ;;
esac
