PYTHON ?= python3
export PYTHON ASSETS TORCH LOCKED

.PHONY: demo test lint venv system

demo: .venv/complete system  ## improve the small policy by PPO, on a CPU; FLAGS="..." adds flags
	.venv/bin/python train_grpo.py --preset tiny --device cpu $(FLAGS)

test: .venv/development system lint  ## everything that CI runs
	.venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: .venv/development
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

venv:  ## the Python environment alone; TORCH=cpu: without CUDA; LOCKED=1: the versions of requirements.lock
	scripts/make_venv.sh

.venv/complete: $(filter-out $(patsubst %,requirements-%.txt,benchmarks dev ray),$(wildcard requirements*.txt))
	scripts/make_venv.sh

.venv/development: .venv/complete requirements-dev.txt
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -r requirements-dev.txt
	touch $@

system:
	@scripts/system_packages.sh
