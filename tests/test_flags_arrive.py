"""What a flag asks for reaches the part that does it: in train_grpo.py on fakes, in `set_up` on a small checkpoint."""

import sys

import pytest

import experiment.setup
import preflight
import train_grpo
from configs.cli import parse_train
from experiment.setup import set_up
from experiment.stored_run import METRICS_FILE, read_metrics
from tests.fakes import FakePool, Script
from tests.small_checkpoint import trained_policy
from tests.test_faults import only_run, results, start, stored_state, use_fakes

BY_TOKEN = ["--ratio-level", "token"]


@pytest.fixture
def played(monkeypatch, tmp_path):
    """Play a run of train_grpo.py without warmup on scripted episodes; returns its folder."""
    use_fakes(monkeypatch)

    def play(script, *flags: str):
        monkeypatch.setattr(experiment.setup, "make_pool", lambda *_: FakePool(script))
        output = tmp_path / str(len(list(tmp_path.iterdir())))
        assert start(monkeypatch, output, "--no-warmup", *flags) == 0
        return only_run(output)

    return play


def test_dynamic_sampling_plays_on_until_groups_teach(played):
    flags = ["--dynamic-sampling", "--group-size", "3", "--advantage", "group", *BY_TOKEN]
    state = stored_state(played(lambda *_: Script(8), "--total-steps", "48", *flags))
    assert (state["updates_done"], state["global_step"]) == (1, 48)  # no episode succeeds: no group teaches


def test_curriculum_draws_tasks_by_their_success(played):
    run = played(lambda *_: Script(8), "--total-steps", "24", "--task-ids", "0", "1", "--curriculum")
    assert any("curriculum/probability_task_1" in record for record in read_metrics(run / METRICS_FILE))


def test_gae_learns_from_the_critics_values(played):
    def script(_, state: int) -> Script:
        return Script(8 + state % 9, success=state % 2 == 0)

    weights = []
    for kind in ("gae", "batch"):
        run = played(script, "--total-steps", "96", "--advantage", kind, *BY_TOKEN)
        weights.append(results(run)[1])
    assert weights[0] != weights[1]


def test_data_parallel_starts_the_same_command_once_for_each_gpu(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(train_grpo, "ranks_to_start", lambda: 2)
    monkeypatch.setattr(
        train_grpo, "run_as_ranks", lambda command, size: started.append((command, size)) or 0
    )
    with pytest.raises(SystemExit):
        start(monkeypatch, tmp_path, "--data-parallel")
    assert started == [([sys.executable, *sys.argv], 2)]


def set_up_with(checkpoint, *flags: str):
    on_cpu = ["--preset", "smoke", "--device", "cpu", "--assets", "lowpoly", "--max-env-steps", "8"]
    return set_up(parse_train([*on_cpu, "--checkpoint", str(checkpoint), *flags]).config)


def test_an_adapter_is_its_own_teacher_and_its_run_is_probed(small, tmp_path, monkeypatch):
    rows = []
    monkeypatch.setattr(preflight, "log_row", lambda name, _: rows.append(name))
    trained_policy(small).save_adapter(tmp_path / "adapter")
    with set_up_with(tmp_path / "adapter", "--frozen-weights", "bf16") as setup:
        assert setup.learner.policy.equals_teacher()
        assert setup.learner.policy.frozen_weights == "bf16"
        preflight.probe(setup)
    assert rows[-4:] == ["attention", "images", "log-probs", "learning"]


def test_the_networks_flags_reach_the_network(small):
    with set_up_with(small, "--lora-rank", "3", "--trained-blocks", "2") as setup:
        network = setup.learner.policy.network
        assert network.trained_blocks == 2
        matrices = network.adapters.named_matrices().items()
        assert {len(matrix) for name, matrix in matrices if name.endswith("lora_A")} == {3}
