"""Two processes that train together against one process with the same data (tests/together.py says what they do)."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from errors import BadInput
from rl.ranks import ALONE, _parts, join_ranks, own_gpu
from rl.run import read_metrics
from tests.small_checkpoint import make_small_checkpoint
from tests.together import results

ROOT = Path(__file__).parents[1]
UPDATES = ["uneven", "one row each", "poisoned", "drifting", "nothing active", "one rank short of memory"]


def launched(rank: int, port: int) -> dict[str, str]:
    """The environment variables that `accelerate launch` gives to its processes."""
    return {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    make_small_checkpoint(folder / "small")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.together", str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, cwd=ROOT, env=launched(rank, port), **pipes) for rank in (0, 1)]
    said = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0, 9], "\n".join(said)
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone() -> dict:
    return results(ALONE)


# updates


@pytest.mark.parametrize("case", UPDATES)
def test_the_gradients_are_those_of_one_process_with_the_same_data(both, alone, case):
    expected = alone[case]["gradients"]
    assert len(expected) == len(both[0][case]["gradients"])
    for found, gradient in zip(both[0][case]["gradients"], expected, strict=True):
        torch.testing.assert_close(found, gradient)


def test_the_first_gradient_differs_by_rounding_only(both, alone):
    (found, *_), (expected, *_) = both[0]["uneven"]["gradients"], alone["uneven"]["gradients"]
    assert (found - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("case", UPDATES)
def test_after_an_update_all_ranks_have_the_same_bits(both, case):
    for first, second in zip(both[0][case]["parameters"], both[1][case]["parameters"], strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("case", UPDATES)
def test_all_ranks_record_the_metrics_of_the_whole_minibatches(both, alone, case):
    assert both[0][case]["metrics"] == both[1][case]["metrics"]
    assert both[0][case]["metrics"] == pytest.approx(alone[case]["metrics"], rel=1e-4, abs=1e-7)


def test_active_rows_are_divided(both):
    assert [found["uneven"]["rows_run"] for found in both] == [2 * 3, 2 * 2]  # 5 rows in each of 2 epochs
    assert [found["one row each"]["rows_run"] for found in both] == [2 * 5, 0]
    assert both[1]["one row each"]["metrics"]["train/optimizer_steps"] == 10


def test_a_gradient_that_one_rank_finds_broken_is_skipped_by_all(both):
    for found in both:
        metrics = found["poisoned"]["metrics"]
        assert (metrics["train/skipped_steps"], metrics["train/optimizer_steps"]) == (1, 3)
        assert all(torch.isfinite(p).all() for p in found["poisoned"]["parameters"])


def test_all_ranks_stop_after_the_same_epoch(both, alone):
    epochs = [found["drifting"]["metrics"]["train/epochs"] for found in (*both, alone)]
    assert epochs[0] == epochs[1] == epochs[2] < 10


def test_an_update_without_active_rows_takes_no_step_anywhere(both):
    assert [found["nothing active"]["gradients"] for found in both] == [[], []]


def test_a_parameter_that_no_rank_reaches_keeps_no_gradient(both):
    for found in both:
        shared, of_one, of_none = found["unreached"]
        assert (shared.tolist(), of_one.tolist(), of_none) == ([3.0, 3.0], [5.0, 5.0], None)


@pytest.mark.parametrize(
    ("at_most", "sizes"), [(1, [[3], [1], [2], [4]]), (4, [[3, 1], [2], [4]]), (99, [[3, 1, 2, 4]])]
)
def test_gradients_travel_in_parts_of_a_bounded_size(at_most, sizes):
    gradients = [torch.zeros(count) for count in (3, 1, 2, 4)]
    parts = list(_parts(gradients, at_most))
    assert [[len(gradient) for gradient in part] for part in parts] == sizes
    assert [id(gradient) for part in parts for gradient in part] == [id(gradient) for gradient in gradients]


def test_values_and_teacher_distributions_are_computed_in_parts_and_known_to_all(both, alone):
    for first, second, expected in zip(both[0]["values"], both[1]["values"], alone["values"], strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected)


# rollouts


@pytest.mark.parametrize("case", ["rollout", "rollout of three environments"])
def test_ranks_play_other_initial_states_and_know_all_trajectories(both, case):
    played = [set(found[case]["started"]) for found in both]
    assert played[0]
    assert played[1]
    assert not played[0] & played[1]
    assert both[0][case]["trajectories"] == both[1][case]["trajectories"]
    known = {(episode.task_id, episode.init_state_id) for episode, *_ in both[0][case]["trajectories"]}
    assert known <= played[0] | played[1]


def test_the_trajectories_of_a_group_stay_together(both):
    groups = [episode.group for episode, *_ in both[0]["rollout"]["trajectories"]]
    assert groups == sorted(groups)
    assert all(groups.count(group) == 2 for group in groups)


def test_n_steps_is_the_total_over_the_ranks(both, alone):
    total = sum(env_steps for _, _, env_steps, _ in both[0]["rollout"]["trajectories"])
    longest_group = 2 * 16
    assert 120 <= total < 120 + 2 * longest_group
    assert 120 <= sum(t[2] for t in alone["rollout"]["trajectories"]) < 120 + longest_group


@pytest.mark.parametrize("case", ["rollout", "rollout of three environments"])
def test_an_episode_is_the_same_whoever_plays_it(both, alone, case):
    expected = {episode.index: rest for episode, *rest in alone[case]["trajectories"]}
    shared = [(episode, rest) for episode, *rest in both[0][case]["trajectories"] if episode.index in expected]
    assert len(shared) > 4
    assert all(rest == expected[episode.index] for episode, rest in shared)


def test_the_number_of_environments_does_not_change_what_is_recorded_beyond_the_last_groups(both):
    one, three = (both[0][case]["trajectories"] for case in ("rollout", "rollout of three environments"))
    assert set(t[0].index for t in one) <= set(t[0].index for t in three)


def test_dynamic_sampling_keeps_the_same_groups_on_all_ranks(both):
    assert both[0]["dynamic sampling"] == both[1]["dynamic sampling"]
    played, kept = both[0]["dynamic sampling"]
    assert 0 < len(kept) < len(played)
    assert len({episode.index for episode, *_ in played}) == len(played)


def test_an_evaluation_is_divided_and_its_result_is_that_of_one_process(both, alone):
    assert both[0]["validation"]["metrics"] == both[1]["validation"]["metrics"] == alone["validation"]["metrics"]
    assert sum(found["validation"]["played"] for found in both) == alone["validation"]["played"] == 5 + 5 + 15
    assert abs(both[0]["validation"]["played"] - both[1]["validation"]["played"]) <= 3
    assert (both[0]["validation"]["frames"] > 0, both[1]["validation"]["frames"]) == (True, 0)


# a base that is spread over the ranks

SHARDED = pytest.mark.parametrize("case", ["sharded", "sharded, bfloat16"])


@SHARDED
def test_each_rank_has_a_part_of_the_frozen_weights_and_all_adapters(both, case):
    for (own_0, whole), (own_1, _) in zip(both[0][case]["own part"], both[1][case]["own part"], strict=True):
        assert own_0 + own_1 == whole
        assert max(own_0, own_1) < 0.6 * whole
    assert all(found[case]["types of the trained"] == {torch.nn.Parameter} for found in both)


@SHARDED
def test_a_sharded_policy_acts_as_a_whole_one_though_ranks_act_differently_often(both, case):
    assert [len(found[case]["acted"][0]) for found in both] == [1, 3]
    for found in both:
        assert torch.equal(*found[case]["acted"])
        assert torch.equal(*found[case]["teacher"])


@SHARDED
def test_a_sharded_policy_has_the_gradients_of_a_whole_one(both, case):
    for found in both:
        whole, cut = found[case]["gradients"]
        assert len(whole) == len(cut) == 2
        for expected, gradient in zip(whole, cut, strict=True):
            assert expected.norm() > 0
            torch.testing.assert_close(gradient, expected)


@SHARDED
def test_a_whole_policy_loads_what_a_sharded_one_saved(both, case):
    for found in both:
        assert torch.equal(*found[case]["reloaded"])


# files, faults


def test_only_rank_0_writes(both):
    main, other = (found["written"] for found in both)
    assert main["folder"] == other["folder"]
    assert [row["rank"] for row in read_metrics(main["folder"])] == [0]
    assert any("step_0" in touched for touched in main["touched"])
    assert other["touched"] == []
    assert (main["best"], other["best"]) == ("step_0", "step_0")


def test_one_differing_bit_is_found(both):
    assert all("ranks 0 and 1 no longer train" in found or "ranks 1 and 0 no longer" in found for found in
               (both[0]["drift"], both[1]["drift"]))  # fmt: skip


def test_a_rank_that_dies_ends_the_others_with_one_line(both):
    message, code = both[0]["lost"]
    assert message.startswith("rank 0: another rank has stopped")
    assert "\n" not in message
    assert code == message  # what SystemExit prints before it exits with code 1


# joining


def test_plain_python_initialises_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_ranks(torch.device("cpu")) is ALONE
    assert not torch.distributed.is_initialized()


def test_more_processes_than_gpus_are_refused(monkeypatch):
    for name, value in launched(0, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="2 processes on this machine, but torch sees 0 GPU"):
        own_gpu()


@pytest.mark.parametrize("rank", [0, 1])
def test_every_process_has_a_gpu_of_its_own_and_says_its_number(monkeypatch, rank):
    """safetensors takes "cuda" for the first GPU, torch for the current one: a network would lie on two."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_gpu() == torch.device("cuda", 0)
    for name, value in launched(rank, 1).items():
        monkeypatch.setenv(name, value)
    assert own_gpu() == torch.device("cuda", rank)
