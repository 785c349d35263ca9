#!/usr/bin/env bash
# What a volunteer with a GPU of 24 GB runs once: the 7B policy's start, memory, speed and default run, as one page to send.
#   scripts/first_7b.sh [CHECKPOINT] [flags of train_grpo.py]
#   scripts/first_7b.sh --max-hours 10                 # the public checkpoint of libero_spatial: 15 GB to download
#   scripts/first_7b.sh FOLDER --max-hours 10          # a checkpoint that is here
# Everything goes to runs/first_7b (or the folder FIRST_7B): result.md is the page. The same command goes on where it was
# stopped: a step whose file NAME.log exists is skipped. STATES is the number of initial states (50).
# docs/COMMUNITY_RESULTS.md says how to send the page.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || { echo "first_7b.sh: there is no .venv: run make venv system" >&2; exit 2; }
out=${FIRST_7B:-runs/first_7b}
states=${STATES:-50}
checkpoint=
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
    checkpoint=$1
    shift
fi
default=$("$python" -c 'from configs.presets import PUBLIC_CHECKPOINTS; print(PUBLIC_CHECKPOINTS["libero_spatial"])')
checkpoint=${checkpoint:-$default}
# One GPU, which nvidia-smi and torch know by the same number.
visible=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${visible%%,*} CUDA_DEVICE_ORDER=PCI_BUS_ID PYTHONUNBUFFERED=1
mkdir -p "$out"

# step NAME COMMAND...: run the command, with its output on the terminal and in NAME.unfinished, then name that NAME.log.
step() {
    local name=$1
    shift
    if [ -e "$out/$name.log" ]; then
        echo "== $name: done before"
        return
    fi
    echo "== $name: $*"
    if "$@" 2>&1 | tee -i -a "$out/$name.unfinished"; then
        mv "$out/$name.unfinished" "$out/$name.log"
        return
    fi
    "$python" -m benchmarks.first_7b_report "$out"
    echo "first_7b.sh: $name did not end well, see $out/$name.unfinished. The page has what there is, and a card on which" \
        "something fails is a result, too. The same command goes on here." >&2
    exit 1
}

# measure NAME COMMAND...: a step whose printed lines, seconds and peak of the whole GPU are kept in NAME.json.
measure() {
    step "$1" "$python" -m benchmarks.first_7b measure "$out/$1.json" "${@:2}"
}

find_run() {
    compgen -G "$out/runs/*/checkpoints/latest" | tail -n 1 | sed 's,/checkpoints/latest$,,'
}

step machine "$python" -m benchmarks.first_7b machine "$out/machine.json"
step check "$python" train_grpo.py --task-id 0 --checkpoint "$checkpoint" --output "$out/runs" "$@" --check-only
step start "$python" eval.py --checkpoint "$checkpoint" --task-ids 0 --trials "$states" --out "$out/start.json"

folder=$("$python" -c 'import sys; from vla.hub import resolve_checkpoint as r; print(r(sys.argv[1]))' "$checkpoint")
if [ "$("$python" -c 'import torch; print(torch.cuda.is_available())')" = True ]; then
    measure speed "$python" -m benchmarks.gpu --folder "$folder" --no-iteration
    measure memory "$python" -m benchmarks.data_parallel "$folder" --ways one
else
    measure speed "$python" -m benchmarks.decision "$folder"
    measure memory "$python" -m benchmarks.data_parallel "$folder" --ways one --device cpu --memory-budget None
fi

run=$(find_run || true)
if [ -n "$run" ]; then
    measure run "$python" train_grpo.py --resume "$run" "$@"
else
    measure run "$python" train_grpo.py --task-id 0 --checkpoint "$checkpoint" --output "$out/runs" "$@"
    run=$(find_run)
fi
step end "$python" eval.py --checkpoint "$run/checkpoints/latest" --compare-with "$out/start.json" --task-ids 0 \
    --trials "$states" --out "$out/end.json"
"$python" -m benchmarks.first_7b_report "$out"
