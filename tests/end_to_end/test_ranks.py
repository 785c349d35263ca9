"""Two ranks compute what one process computes: started as --data-parallel does it, and by `accelerate launch`."""

import os
import socket
import subprocess
import sys

import pytest

import train_grpo
from contracts import BadInput
from tests.end_to_end.conftest import ROOT, flags_into, only_run, run_command
from tests.end_to_end.test_resume import assert_same_run

# Two rows per step, one for each process: the sum of two gradients does not depend on who adds them, and every pass
# has one row. So not only the numbers agree with those of one process, but their bits.
SAME_BITS = ["--batch-size", "2", "--micro-batch-size", "1"]
TWO_UPDATES = ["--transition-steps", "0", "--total-steps", "64", "--eval-interval", "1000"]


@pytest.fixture(scope="module")
def one_process(smoke, tmp_path_factory):
    flags = flags_into([*smoke, *SAME_BITS, *TWO_UPDATES], tmp_path_factory.mktemp("one"))
    train_grpo.main(flags)
    return only_run(flags)


def launch(config: str, *argv: str) -> subprocess.Popen:
    command = ["-m", "accelerate.commands.launch", "--config_file", f"configs/accelerate/{config}.yaml"]
    return subprocess.Popen(
        [sys.executable, *command, "--num_processes", "2", *argv], cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_killed_and_resumed_on_two_machines_a_run_equals_that_of_one_process(smoke, one_process, tmp_path):
    flags = flags_into([*smoke, *SAME_BITS, *TWO_UPDATES], tmp_path)
    started = (
        "import sys; from rl.ranks import run_as_ranks; sys.exit(run_as_ranks([sys.executable, *sys.argv[1:]], 2))"
    )
    killed = ["-m", "tests.end_to_end.killed", "update", "5", "train_grpo"]
    cut = run_command("-c", started, *killed, *flags)
    assert cut.returncode not in (0, 1, 2), cut.stdout + cut.stderr
    run = only_run(flags)

    with pytest.raises(BadInput, match=r"trains in 2 process\(es\)"):
        train_grpo.main(["--resume", str(run)])

    port = ["--main_process_port", free_port(), "--num_machines", "2"]
    machines = [
        launch("several_machines", *port, "--machine_rank", rank, "train_grpo.py", "--resume", str(run))
        for rank in ("0", "1")
    ]
    said = [machine.communicate(timeout=600)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert_same_run(run, one_process)
    assert "step 64/64" in said[0]
    assert "step" not in said[1]  # rank 0 speaks for all
