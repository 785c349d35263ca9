"""Two ranks compute what one process computes: started as --data-parallel does it, and by torchrun."""

import socket
import subprocess
import sys

import pytest
import torch

import train_grpo
from contracts import BadInput
from envs import pool
from rl.launcher import run_as_ranks
from tests.end_to_end import reach
from tests.end_to_end.conftest import ROOT, flags_into, latest_of, only_run
from tests.end_to_end.test_resume import assert_same_run, weights_of

# Two rows per step, one for each process: the sum of two gradients does not depend on who adds them, and every pass
# has one row. So not only the numbers agree with those of one process, but their bits.
SAME_BITS = ["--batch-size", "2", "--micro-batch-size", "1"]
TWO_UPDATES = [
    "--max-env-steps", "8", "--n-steps", "16", "--warmup-steps", "16", "--transition-steps", "0", "--total-steps", "32",
    "--eval-interval", "1000",
]  # fmt: skip


def machine_of_two(rank: int, port: int, *argv: str) -> subprocess.Popen:
    """A machine of two with one rank each, as docs/SCALE_OUT.md starts it."""
    addresses = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    machines = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *machines, *addresses, *argv],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.usefixtures("own_signals")
def test_killed_and_resumed_on_two_machines_a_run_equals_that_of_one_process(smoke, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pool, "make_env", reach.make_env)
    flags = [*smoke, *SAME_BITS, *TWO_UPDATES]
    alone, flags = flags_into(flags, tmp_path / "alone"), flags_into(flags, tmp_path / "ranks")
    train_grpo.main(alone)
    # The steps: two of the check before the run, one of the warmup's epoch, two of the second update.
    killed = [sys.executable, "-m", "tests.end_to_end.struck", "5"]
    assert run_as_ranks([*killed, *flags], 2) not in (0, 1, 2)
    run = only_run(flags)
    assert latest_of(run).name == "step_16"

    with pytest.raises(BadInput, match=r"trains in 2 process\(es\)"):
        train_grpo.main(["--resume", str(run)])

    port = free_port()
    machines = [machine_of_two(rank, port, "-m", reach.__name__, "--resume", str(run)) for rank in (0, 1)]
    outputs = [machine.communicate(timeout=600)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert_same_run(run, only_run(alone))
    assert "success" in outputs[0]
    assert "success" not in outputs[1]  # rank 0 speaks for all


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs, for NCCL")
def test_two_gpus_learn_what_one_learns(smoke, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = [*smoke, *SAME_BITS, *TWO_UPDATES, "--device", "cuda", "--frozen-weights", "float32"]
    learned = []
    for num_ranks in (1, 2):
        own_flags = flags_into(flags, tmp_path / str(num_ranks))
        assert run_as_ranks([sys.executable, "-m", reach.__name__, *own_flags], num_ranks) == 0
        learned.append(weights_of(only_run(own_flags)))
    one, two = learned
    assert one.keys() == two.keys()
    # Adam moves a number by lr, whatever the size of its gradient, so rounding can turn a step around.
    different = torch.cat([(one[name] - two[name]).abs().flatten() > 1e-4 for name in one])
    assert different.float().mean() < 0.05
