"""A whole run on two devices of one host: the second one is a process, and both are the CPU here."""

import json

import pytest
import torch

import assembly
import train_grpo
from tests.end_to_end.conftest import only_run
from vla.data_parallel import Replicas


@pytest.fixture
def two_cpus(monkeypatch):
    monkeypatch.setattr(assembly, "choose_devices", lambda _: [torch.device("cpu")] * 2)


@pytest.fixture
def agreements(monkeypatch) -> list[bool]:
    """Whether the devices had the same parameters when the run asked, and after each broadcast."""
    found = []
    plain_broadcast, plain_question = Replicas.broadcast_parameters, Replicas.are_equal
    monkeypatch.setattr(Replicas, "are_equal", lambda self: found.append(plain_question(self)) or found[-1])
    monkeypatch.setattr(Replicas, "broadcast_parameters", lambda self: plain_broadcast(self) or self.are_equal())
    return found


def test_a_run_on_two_devices_passes_through_all_phases(two_cpus, agreements, smoke):
    flags = ["--advantage", "gae", "--critic-through-backbone", "--num-envs", "2"]  # 2 envs: batches of 2 to decide on
    steps = ["--warmup-steps", "48", "--transition-steps", "48", "--total-steps", "144", "--eval-interval", "144"]
    train_grpo.main([*smoke, *flags, *steps])
    run = only_run(smoke)
    updates = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in updates if "schedule/phase" in row]
    assert [row["schedule/phase"] for row in updates] == [0, 1, 2]
    errors = [row["train/first_ratio_error"] for row in updates if "train/first_ratio_error" in row]
    assert len(errors) == 2
    assert max(errors) < 1e-5
    steps = sum(row["train/optimizer_steps"] for row in updates)
    assert steps > 0
    # At the start, in the preflight, in the two steps that it takes and takes back, after each optimizer step.
    assert agreements == [True] * int(steps + 6)
    assert "cpu, cpu" in (run / "train.log").read_text()
