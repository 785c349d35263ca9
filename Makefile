PYTHON ?= python3
export PYTHON

.PHONY: demo test lint venv system

demo: .venv/complete system checkpoints/tiny/config.json  ## train a small policy through all phases, on a CPU
	.venv/bin/python train_grpo.py --preset tiny

test: .venv/complete system lint  ## everything that CI runs
	.venv/bin/python -m pytest --numprocesses 2 --dist loadfile

lint: .venv/complete
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

venv: .venv/complete  ## the Python environment alone

.venv/complete: requirements.txt requirements-simulator.txt
	scripts/make_venv.sh

system:
	@scripts/system_packages.sh

checkpoints/tiny/config.json: .venv/complete
	.venv/bin/python -m vla.tiny --l1-head --out checkpoints/tiny
