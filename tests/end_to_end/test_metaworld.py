"""Meta-World from demonstrations of its own experts to a policy that is trained, resumed and evaluated."""

import json

import pytest
import torch

import eval as eval_program
import train_grpo
from tests.end_to_end.conftest import flags_into, only_run, records_of
from tests.end_to_end.test_resume import weights_of
from tests.small_checkpoint import SMALL
from vla.loading import LoadOptions
from vla.policy import Policy
from workshop.demos import DemosArgs, collect
from workshop.sft_config import SftArgs
from workshop.sft_training import fine_tune

pytest.importorskip("metaworld")
SUITE, TASKS = "metaworld_mt50", (18, 43)  # drawer-close and reach


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demos")
    assert collect(DemosArgs(folder, task_suite=SUITE, task_ids=TASKS, episodes=2)) == {"success": 4}
    return folder


@pytest.fixture(scope="module")
def policy(demos, tmp_path_factory) -> str:
    """A policy of the smallest size after a few steps of supervised training."""
    sizes = {"size": SMALL, "steps": 4, "batch_size": 8, "log_every": 2, "warmup_steps": 1}
    out = tmp_path_factory.mktemp("sft") / "policy"
    return str(fine_tune(SftArgs((demos,), out, task_suite=SUITE, holdout=0.25, device="cpu", **sizes)))


@pytest.fixture
def flags(policy, tmp_path) -> list[str]:
    return [
        "--preset", "smoke", "--task-suite", SUITE, "--task-id", str(TASKS[0]), "--checkpoint", policy,
        "--kl-coef", "0.1", "--entropy-coef", "0.01", "--no-warmup", "--output", str(tmp_path / "straight"),
    ]  # fmt: skip


def test_supervised_training_gives_a_policy_of_32_tokens(policy):
    trained = Policy.load(policy, LoadOptions(task_suite=SUITE))
    assert (trained.chunk_length, trained.action_dim, trained.num_images) == (8, 4, 1)
    assert trained.statistics.action.mask.all()  # the gripper's effort is scaled as the motions are
    assert trained.statistics.proprio.dim == 4


def test_a_run_that_is_stopped_after_an_update_resumes_to_the_same_weights(flags, tmp_path):
    train_grpo.main([*flags, "--total-steps", "64"])
    parts = flags_into(flags, tmp_path / "parts")
    train_grpo.main([*parts, "--total-steps", "32"])
    train_grpo.main(["--resume", str(only_run(parts)), "--total-steps", "64"])
    straight, resumed = weights_of(only_run(flags)), weights_of(only_run(parts))
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    assert len([row for row in records_of(only_run(parts)) if "rollout/trajectories" in row]) == 2


def test_an_evaluation_in_worker_processes_names_what_it_saw(policy, tmp_path):
    out = tmp_path / "results.json"
    chosen = ["--task-suite", SUITE, "--task-ids", *map(str, TASKS), "--trials", "2", "--max-env-steps", "16"]
    eval_program.main(["--checkpoint", policy, "--num-envs", "2", "--out", str(out), *chosen])
    stored = json.loads(out.read_text())
    assert stored["complete"]
    assert len(stored["episodes"]) == 4
    assert stored["settings"]["assets"].startswith("metaworld (")
    assert not any(episode["error"] for episode in stored["episodes"])
