"""A new user follows README.md and SUPERVISED_START.md: a clone, no HOME, no network, the commands as they stand.

Flags are appended that make each command short, and names of runs and checkpoints are filled in. The public checkpoint
is a small random one of its format in the download cache.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT
from workshop.tiny import make_tiny_checkpoint

SHORT = (
    "--total-steps 8 --warmup-steps 8 --transition-steps 0 --n-steps 8 --max-env-steps 8 --n-epochs 1 "
    "--eval-init-states 40 41 --allow-zero-baseline --num-envs 1 --wandb-mode disabled"
)
# Of a 7B preset: no GPU is asked for, no success expected, nothing downloaded.
RANDOM_WEIGHTS = "--device cpu --allow-zero-baseline --assets lowpoly"
EVAL_SHORT = "--num-envs 1 --trials 1 --device cpu --max-env-steps 8 --assets lowpoly"
# The commands in the order in which they are followed, and what is appended to each.
FOLLOWED = {
    "make demo": f"FLAGS='{SHORT} --transition-steps 8 --total-steps 24 --num-envs 2 --name demo'",
    "python train_grpo.py --task-id 0": f"{SHORT} {RANDOM_WEIGHTS} --name first",
    "python eval.py --checkpoint runs/RUN/checkpoints/best --task-ids 0 --out results.json": EVAL_SHORT,
    "python -m vla.merge --adapter runs/RUN/checkpoints/best --out MERGED": "",
    "python -m workshop.demos --out demonstrations/spatial --task-ids 0 1 2 --episodes 15 "
    "--num-envs 2": "--task-ids 0 --episodes 1 --num-envs 1",
    "python -m workshop.sft --demos demonstrations/spatial --out checkpoints/mine --num-images 1 --llm-dim 96 "
    "--steps 800 --batch-size 128": "--steps 2 --batch-size 4 --holdout 0",
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone with the environment that `make venv` would put there."""
    clone = tmp_path_factory.mktemp("user") / "clone"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clone / name)
    (clone / ".venv").symlink_to(sys.prefix)
    for requirements in clone.glob("requirements*.txt"):
        os.utime(requirements, (0, 0))  # the environment is up to date
    repository = clone / "cache" / "hub" / "models--Haozhan72--Openvla-oft-SFT-libero-spatial-traj1"
    make_tiny_checkpoint(repository / "snapshots" / ("a" * 40), num_images=1, proprio=False)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    return clone


def documented(command: str) -> bool:
    pages = (ROOT / "README.md", ROOT / "docs" / "SUPERVISED_START.md")
    text = " ".join(" ".join(page.read_text().replace("\\\n", " ").split()) for page in pages)
    return command in text


@pytest.mark.parametrize("command", FOLLOWED)
def test_command_of_the_readme_works(clone, command):
    assert documented(command)
    runs = [str(run.relative_to(clone)) for run in clone.glob("runs/*-first")]
    line = command.replace("runs/RUN", runs[0] if runs else "none")
    environ = {
        "PATH": os.environ["PATH"],
        "HF_HOME": str(clone / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NUMBA_DISABLE_JIT": "1",  # it would compile anew for every new folder
    }
    done = subprocess.run(
        ["bash", "-c", f"source .venv/bin/activate && {line} {FOLLOWED[command]}"],
        cwd=clone,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
