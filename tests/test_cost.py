"""What a run costs: arithmetic on measured speeds, and a measurement that leaves the policy as it was."""

import pytest
import torch

from configs.config import TrainConfig, changed
from configs.sections import TaskConfig
from envs.env import EnvSpec
from envs.tasks import TaskInfo
from experiment.checkpoints import TrainerState
from experiment.cost import SUCCESSFUL_SHARE, Cost, estimate_cost, evaluation_episodes_left, time_left
from experiment.speed import SimulatorSpeed, Speed, time_decision, time_learning, time_simulator
from experiment.terminal import duration
from rl.rollout import Rollout
from tests.fakes import FakePolicy, FakePool, Script, observation, trajectory

TASKS = [TaskInfo(0, "", "", max_env_steps=100, num_init_states=50)]
# 1 s for a round of 4 simulators that play 8 env steps each: 0.2 s to decide, then 8 steps of 0.1 s.
SPEED = Speed(
    num_envs=4,
    cores=4,
    chunk_length=8,
    simulator=SimulatorSpeed(reset_s=2.0, step_s=0.1, exact_step_s=0.2),
    decision_s=0.2,
    learned_s=0.5,
)
CONFIG = changed(
    TrainConfig(),
    total_steps=32_000,
    n_steps=1_000,
    n_epochs=3,
    warmup_steps=4_000,
    warmup_epochs=3,
    eval_init_states=(40, 50),
    eval_trials=1,
    eval_interval=10_000,
    advantage="batch",
)


def with_cores(cores: int) -> Speed:
    return Speed(4, cores, 8, SPEED.simulator, SPEED.decision_s, SPEED.learned_s)


def test_the_cost_follows_from_the_speed():
    cost = estimate_cost(CONFIG, TASKS, SPEED, TrainerState(), student_is_teacher=False)
    # 1,000 rounds of 32 env steps; 32 times 4 simulators wait for 50 of them; 320 resets, 4 at a time.
    assert cost.rollouts_s == pytest.approx(1_000 + 32 * 50 / 8 + 320 * 2 / 4)
    assert cost.updates_s == pytest.approx(4_000 * 3 * 0.5)
    # Six evaluations of 20 episodes and once 10 of the teacher; a round takes 1.8 s in exact physics.
    assert cost.evaluations_s == pytest.approx(130 * (100 / 32 * 1.8 + 2 / 4))


def test_simulators_beyond_the_cores_take_turns_but_learning_does_not():
    alone = estimate_cost(CONFIG, TASKS, SPEED, TrainerState(), student_is_teacher=False)
    shared = estimate_cost(CONFIG, TASKS, with_cores(2), TrainerState(), student_is_teacher=False)
    assert shared.updates_s == alone.updates_s
    assert shared.rollouts_s == pytest.approx(1.8 * (1_000 + 32 * 50 / 8) + 2 * 320 * 2 / 4)
    assert estimate_cost(CONFIG, TASKS, with_cores(64), TrainerState(), student_is_teacher=False) == alone


def test_the_warmup_learns_in_epochs_of_its_own():
    config = changed(CONFIG, warmup_epochs=16)
    cost = estimate_cost(config, TASKS, SPEED, TrainerState(global_step=1_000), student_is_teacher=False)
    assert cost.updates_s == pytest.approx((3_000 * 16 + 28_000 * 3) / 8 * 0.5)
    without = changed(config, warmup=False)
    cost = estimate_cost(without, TASKS, SPEED, TrainerState(), student_is_teacher=False)
    assert cost.updates_s == pytest.approx(32_000 * 3 / 8 * 0.5)


def test_the_absolute_advantage_leaves_out_failed_episodes_but_not_in_the_warmup():
    config = changed(CONFIG, advantage="absolute")
    cost = estimate_cost(config, TASKS, SPEED, TrainerState(), student_is_teacher=False)
    assert cost.updates_s == pytest.approx((500 + 3_500 * SUCCESSFUL_SHARE) * 3 * 0.5)
    penalised = changed(config, kl_coef=0.1)  # the penalty is computed for every decision
    cost = estimate_cost(penalised, TASKS, SPEED, TrainerState(), student_is_teacher=False)
    assert cost.updates_s == pytest.approx(4_000 * 3 * 0.5)


def test_the_time_left_goes_on_at_the_pace_of_the_last_update_and_counts_evaluations():
    rollout = Rollout([trajectory(10)] * 5, times={}, wall_s=100.0, errors=0)  # 20 s an episode
    assert rollout.env_steps == 200
    state = TrainerState(global_step=31_610, evaluated_at=30_000)
    training_s = 2 * 300.0  # of the last rollout 190 env steps are needed, but it is a whole one
    assert time_left(CONFIG, state, rollout, 300.0, episode_s=3.0) == pytest.approx(training_s + 20 * 3.0)
    assert time_left(CONFIG, state, rollout, 300.0, episode_s=None) == pytest.approx(training_s + 20 * 20.0)
    state.global_step = 32_100  # the last evaluation is still to come
    assert time_left(CONFIG, state, rollout, 300.0, episode_s=3.0) == pytest.approx(20 * 3.0)


def test_ranks_divide_the_work_but_each_waits_at_the_end_of_a_rollout():
    two = estimate_cost(CONFIG, TASKS, SPEED, TrainerState(ranks=2), student_is_teacher=False)
    assert two.rollouts_s == pytest.approx((1_000 + 320 * 2 / 4) / 2 + 32 * 50 / 8)
    assert two.updates_s == pytest.approx(4_000 * 3 * 0.5 / 2)


def test_a_resumed_run_costs_what_is_left_of_it():
    state = TrainerState(global_step=16_000, evaluated_at=10_000)
    rest = estimate_cost(CONFIG, TASKS, SPEED, state, student_is_teacher=False)
    whole = estimate_cost(CONFIG, TASKS, SPEED, TrainerState(), student_is_teacher=False)
    assert rest.rollouts_s == pytest.approx(whole.rollouts_s / 2)
    assert rest.updates_s == pytest.approx(whole.updates_s / 2)


def test_a_rollout_is_a_whole_one_however_few_env_steps_are_missing():
    def cost(**settings):
        return estimate_cost(
            changed(CONFIG, **settings), TASKS, SPEED, TrainerState(), student_is_teacher=False
        )

    assert cost(warmup=False, total_steps=1) == cost(warmup=False, total_steps=1_000)
    # Two rollouts of warmup and one after it, each of 1,000 env steps; three epochs of 125 decisions of 0.5 s.
    short = cost(warmup_steps=1_001, total_steps=2_001)
    assert short.rollouts_s == pytest.approx(3 * (1_000 / 32 + 50 / 8 + 10 * 2 / 4))
    assert short.updates_s == pytest.approx(3 * 3 * 125 * 0.5)


@pytest.mark.parametrize(
    ("settings", "state", "student_is_teacher", "episodes"),
    [
        ({}, TrainerState(), False, 6 * 20 + 10),  # at 0, 4,000, 10,000, 20,000, 30,000 and 32,000 env steps
        ({"warmup": False}, TrainerState(), False, 5 * 20 + 10),
        ({}, TrainerState(), True, 6 * 20),
        ({"eval_trials": 0}, TrainerState(), True, 6 * 10),
        ({"task_ids": (0, 1)}, TrainerState(), True, 6 * 40),
        ({"eval_interval": 32_000}, TrainerState(), True, 3 * 20),
        (
            {"eval_interval": 1},
            TrainerState(),
            True,
            33 * 20,
        ),  # one before each of 32 rollouts, one at the end
        ({"total_steps": 0}, TrainerState(), False, 20 + 10),
        ({}, TrainerState(global_step=16_000, evaluated_at=10_000), False, 3 * 20),
        ({}, TrainerState(global_step=33_000, evaluated_at=33_000), False, 0),
    ],
)
def test_evaluations_are_counted(settings, state, student_is_teacher, episodes):
    assert evaluation_episodes_left(changed(CONFIG, **settings), state, student_is_teacher) == episodes


def test_the_sentence_names_the_whole_and_its_parts():
    assert str(Cost(rollouts_s=2_400, updates_s=4_800, evaluations_s=600)) == (
        "about 2 h 10 min (rollouts 40 min, updates 1 h 20 min, evaluations 10 min)"
    )
    assert [duration(seconds) for seconds in (0, 0.2, 59, 60, 3_580, 7_300)] == [
        "0 s",
        "1 s",
        "59 s",
        "1 min",
        "1 h 0 min",
        "2 h 2 min",
    ]


def test_measuring_decides_for_all_simulators_and_leaves_the_policy_as_it_was():
    policy = FakePolicy(adapter_scale=0.1)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    time_decision(policy, observation(1.0, 2.0, 3.0), num_envs=6)
    time_decision(policy, observation(1.0, 2.0, 3.0), num_envs=6, max_batch=4)
    assert {batch_size for _, batch_size in policy.modes} == {6, 4}
    assert time_learning(policy, observation(1.0, 2.0, 3.0), micro_batch_size=2) > 0
    assert all(map(torch.equal, policy.parameters(), before))
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_a_batch_that_does_not_fit_is_timed_in_parts(monkeypatch):
    policy = FakePolicy()
    act = policy.act

    def out_of_memory_above_two(observations):
        if len(observations) > 2:
            raise torch.OutOfMemoryError
        return act(observations)

    monkeypatch.setattr(policy, "act", out_of_memory_above_two)
    time_decision(policy, observation(1.0, 2.0, 3.0), num_envs=8)
    assert {batch_size for _, batch_size in policy.modes} == {2}


def test_a_simulator_is_timed_in_the_physics_of_training_and_of_evaluation_even_if_its_episode_ends_soon():
    pool = FakePool(lambda *_: Script(env_steps=12))
    pool.spec = EnvSpec("libero_spatial", (0,))
    speed = time_simulator(pool, TaskConfig(), "fast")
    assert pool.physics == ["exact", "fast"]
    assert min(speed) > 0
    assert time_simulator(pool, TaskConfig(), "exact").step_s > 0
    assert pool.physics == ["exact", "fast", "exact"]
