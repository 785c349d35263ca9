"""A new user follows README.md and SUPERVISED_START.md: a clone, no HOME, no network, every command word by word.

Each command is typed as it stands, with names of runs and checkpoints filled in and with flags appended that make it
short. The public checkpoints are small random ones of their format in the download cache.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.cli import parse_train
from tests.end_to_end.conftest import ROOT
from workshop.tiny import make_tiny_checkpoint

TINY = "checkpoints/tiny-libero-spatial"
SHORT = (
    "--total-steps 8 --warmup-steps 8 --transition-steps 0 --n-steps 8 --max-env-steps 8 --n-epochs 1 "
    "--eval-init-states 40 41 --allow-zero-baseline --num-envs 1 --wandb-mode disabled"
)
EVAL_SHORT = "--num-envs 1 --trials 1 --video none --device cpu --max-env-steps 8"
# Of a 7B preset: no GPU is asked for, no success expected, nothing downloaded.
RANDOM_WEIGHTS = "--device cpu --allow-zero-baseline --assets lowpoly"
# The commands in the order in which they are followed, and what is appended to each. Of those with None only the flags
# are read: set-ups like theirs are made by other commands here.
FOLLOWED: dict[str, str | None] = {
    "make demo": f"FLAGS='{SHORT} --num-envs 2 --name demo'",
    "python train_grpo.py --task-id 0 --check-only": f"{RANDOM_WEIGHTS} --num-envs 1",
    "python train_grpo.py --task-id 0": f"{SHORT} {RANDOM_WEIGHTS} --name first",
    "python train_grpo.py --task-suite libero_goal --task-ids 0 1 2": None,
    "python train_grpo.py --checkpoint PATH_OR_HUB_ID --task-id 0": None,
    "python train_grpo.py --preset rl --task-id 0": None,
    "python train_grpo.py --task-id 0 --data-parallel": f"--checkpoint {TINY} --check-only",
    "python train_grpo.py --resume runs/RUN": "--total-steps 16",
    "python eval.py --checkpoint runs/RUN/checkpoints/best --task-ids 0 --out results.json": EVAL_SHORT,
    "python eval.py --checkpoint runs/RUN/checkpoints/latest --compare-with CHECKPOINT --task-ids 0": EVAL_SHORT,
    "python -m vla.merge --adapter runs/RUN/checkpoints/best --out MERGED": "",
    "python -m workshop.demos --out demonstrations/spatial --task-ids 0 1 2 --episodes 15 "
    "--num-envs 2": "--task-ids 0 --episodes 2 --num-envs 1",
    "python -m workshop.sft --demos demonstrations/spatial --out checkpoints/mine --num-images 1 --llm-dim 96 "
    "--steps 800 --batch-size 128": "--steps 2 --batch-size 4",
    "python -m workshop.sft --init PATH_OR_HUB_ID --demos demonstrations/spatial --lora-rank 32 --batch-size 64 "
    "--steps 3000 --out SUPERVISED": "--steps 2 --batch-size 4",
    "python train_grpo.py --checkpoint SUPERVISED --task-id 0": f"{RANDOM_WEIGHTS} --num-envs 1 --check-only",
    "python train_grpo.py --preset tiny --checkpoint checkpoints/mine --task-ids 0 1 2": None,
}
INSTALL = "make venv system"  # the user of these tests has it
# 6,500 episodes, which are begun and interrupted.
PROTOCOL = "python eval.py --checkpoint CHECKPOINT --protocol libero --task-suite all"
PAGES = ("README.md", "docs/SUPERVISED_START.md")


def commands_of(page: Path) -> list[str]:
    """The command lines in a page's bash blocks, without comments and with continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    without_comments = (re.sub(r"\s+#.*", "", line) for line in lines)
    return [" ".join(line.split()) for line in without_comments if line.strip()]


def test_every_command_of_the_readme_is_followed():
    commands = {command for page in PAGES for command in commands_of(ROOT / page)}
    assert commands == FOLLOWED.keys() | {INSTALL, PROTOCOL}


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> Iterator["User"]:
    user = User(tmp_path_factory.mktemp("user"))
    yield user
    user.python.communicate()


class User:
    """A clone with the environment that `make venv` would put there, and the public checkpoints in the cache."""

    def __init__(self, home: Path):
        self.clone = home / "clone"
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in listed.stdout.splitlines():
            (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.clone / name)
        (self.clone / ".venv").symlink_to(sys.prefix)
        for requirements in self.clone.glob("requirements*.txt"):
            os.utime(requirements, (0, 0))  # the environment is up to date
        for suite in ("spatial", "goal"):
            repository = home / "cache" / "hub" / f"models--Haozhan72--Openvla-oft-SFT-libero-{suite}-traj1"
            make_tiny_checkpoint(repository / "snapshots" / ("a" * 40), num_images=1, proprio=False)
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text("a" * 40)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HF_HOME": str(home / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "NUMBA_DISABLE_JIT": "1",  # it would compile anew for every new folder
        }
        self.python = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.forked"],
            cwd=self.clone,
            env=self.environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, line: str) -> tuple[int, str]:
        """The exit code and the output of a command. Python's are forked: that saves the import of PyTorch."""
        program, *argv = shlex.split(line)
        if program != "python":
            return self.run_in_shell(line)
        print(json.dumps(argv), file=self.python.stdin, flush=True)
        exit_code, output = json.loads(self.python.stdout.readline())
        return exit_code, output

    def run_in_shell(self, line: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", f"source .venv/bin/activate && {line}"],
            cwd=self.clone,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout

    def fill_in(self, line: str) -> str:
        """Put the names of this user's run and checkpoint in place of the README's."""
        runs = [str(run.relative_to(self.clone)) for run in self.clone.glob("runs/*-first")]
        names = {"runs/RUN": runs[0] if runs else "none", "PATH_OR_HUB_ID": TINY, "CHECKPOINT": TINY}
        for placeholder, name in names.items():
            line = line.replace(placeholder, name)
        return line


@pytest.mark.parametrize("command", FOLLOWED)
def test_command_of_the_readme_works(user, command):
    appended = FOLLOWED[command]
    if appended is None:
        parse_train(shlex.split(user.fill_in(command))[2:])
        return
    exit_code, output = user.run(f"{user.fill_in(command)} {appended}")
    assert exit_code == 0, output
    assert "Traceback" not in output


def test_the_published_protocol_begins_and_stops_in_good_order(user):
    """The checkpoint has statistics of all suites: it is one of those in the cache."""
    command = PROTOCOL.replace("CHECKPOINT", "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1")
    command += " --num-envs 2 --device cpu --assets lowpoly --out protocol.json"
    wait_for_results = "while [ ! -e protocol.json ] && kill -0 $!; do sleep 0.2; done"
    exit_code, output = user.run_in_shell(f"{{ {command} & {wait_for_results}; kill $!; wait $!; }}")
    assert exit_code == 130, output
    assert "Traceback" not in output
