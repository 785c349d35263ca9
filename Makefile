PYTHON ?= python3
ASSETS ?= official
export PYTHON ASSETS

.PHONY: demo test lint venv system

demo: .venv/complete system  ## improve the small policy by PPO, on a CPU; FLAGS="..." adds flags
	.venv/bin/python train_grpo.py --preset tiny $(FLAGS)

test: .venv/complete system lint  ## everything that CI runs
	.venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: .venv/complete
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

venv: .venv/complete  ## the Python environment alone; ASSETS=none leaves out LIBERO's own meshes and textures

.venv/complete: $(filter-out requirements-ray.txt requirements-benchmarks.txt,$(wildcard requirements*.txt))
	scripts/make_venv.sh

system:
	@scripts/system_packages.sh
