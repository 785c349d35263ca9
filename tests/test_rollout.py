"""`rollout` and `decide` over scripted episodes: what is kept, what is recorded, and what nothing may depend on."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import BadInput
from rl.behaviour import Behaviour, decide
from rl.episode_order import PlayAll, PlaySteps
from rl.episode_player import MAX_ATTEMPTS, MAX_BAD_STARTS, EpisodePlayer
from rl.randomness import Randomness, torch_generator
from rl.ranks import ALONE
from rl.rollout import play_rollout
from rl.trajectory import Episode
from tests.fakes import CHUNK_LENGTH, FakePolicy, FakePool, Script, contents, random_observations
from vla.tokens import token_logprobs

STUDENT = Behaviour(epsilon_start=0.0, temperature=1.0, record_student_logprobs=True)
RANDOMNESS = Randomness(seed=0, purpose="rollout", update_index=0)


def episodes(count: int | None = None, group_size: int = 1):
    """Initial state = episode index, so that a script can speak about one episode."""
    numbers = itertools.count() if count is None else range(count)
    return (Episode(i, 0, i, i // group_size) for i in numbers)


def lengths_script(*lengths: int):
    """Episode i lasts lengths[i] env steps, cyclically; every third succeeds."""
    return lambda task_id, state: Script(lengths[state % len(lengths)], success=state % 3 == 0)


def play(pool, behaviour=STUDENT, n_steps=None, source=None, policy=None, max_batch=None):
    source = episodes() if source is None else source
    player = EpisodePlayer(policy or FakePolicy(), pool, behaviour, RANDOMNESS, max_batch)
    if n_steps is None:
        return play_rollout(player, PlayAll(source, ALONE))
    return play_rollout(player, PlaySteps(source, n_steps, pool.num_slots, ALONE))


def played(collected) -> list[int]:
    return [t.episode.index for t in collected.trajectories]


# which episodes


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    n_steps=st.integers(1, 80),
    num_slots=st.integers(2, 5),
    group_size=st.integers(1, 3),
    orders=st.tuples(st.integers(0, 999), st.integers(0, 999)),
)
def test_order_of_completion_changes_nothing(lengths, n_steps, num_slots, group_size, orders):
    script = lengths_script(*lengths)
    results = [
        play(FakePool(script, num_slots, order), n_steps=n_steps, source=episodes(None, group_size))
        for order in (None, *orders)
    ]
    assert len({str(contents(result.trajectories)) for result in results}) == 1


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    num_slots=st.integers(1, 5),
    n=st.integers(1, 80),
)
def test_a_rollout_is_a_gapless_prefix_of_whole_episodes_that_reaches_n_steps(lengths, num_slots, n):
    collected = play(FakePool(lengths_script(*lengths), num_slots, order_seed=0), n_steps=n)
    assert played(collected) == list(range(len(collected.trajectories)))
    assert collected.env_steps >= n
    for t in collected.trajectories:
        length = lengths[t.episode.index % len(lengths)]
        assert t.env_steps == length == sum(d.executed for d in t.decisions)
        assert t.success == (t.episode.index % 3 == 0)
        assert len(t.decisions) == -(-length // CHUNK_LENGTH)


def test_waiting_for_a_single_simulator_counts_as_waiting():
    assert play(FakePool(lengths_script(8), num_slots=1), n_steps=8).times["wait"] > 0


# simulator faults


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("fault_after", [0, 1, 2])
def test_a_faulty_episode_is_played_again_with_the_same_randomness(num_slots, fault_after):
    def script(faults):
        return lambda _, state: Script(
            15, success=True, faults=faults if state == 1 else 0, fault_after=fault_after
        )

    pool = FakePool(script(2), num_slots, order_seed=0)
    collected = play(pool, n_steps=40)
    clean = play(FakePool(script(0), num_slots, order_seed=5), n_steps=40)
    assert contents(collected.trajectories) == contents(clean.trajectories)
    assert (collected.errors, clean.errors) == (2, 0)
    assert all(t.success for t in collected.trajectories)
    last_attempt = pool.received[(0, 1, 3)]
    for attempt in (1, 2):
        until_fault = pool.received.get((0, 1, attempt), [])
        assert len(until_fault) == (fault_after + 1 if fault_after else 0)  # the last one met the fault
        np.testing.assert_array_equal(until_fault, last_attempt[: len(until_fault)])


def test_an_episode_that_cannot_be_played_is_left_out():
    def script(bad_state):
        return lambda _, state: Script(8 + state, faults=99 if state == bad_state else 0, fault_after=1)

    pools = [FakePool(script(1), 3, order_seed) for order_seed in range(3)]
    collected = [play(pool, n_steps=40) for pool in pools]
    assert played(collected[0])[:3] == [0, 2, 3]
    assert len({str(contents(one.trajectories)) for one in collected}) == 1
    assert pools[0].started.count((0, 1)) == MAX_ATTEMPTS == 3


def test_a_simulator_that_fails_wherever_it_starts_ends_the_run():
    pool = FakePool(lambda _, state: Script(8, faults=99 if state >= 2 else 0), num_slots=2)
    with pytest.raises(RuntimeError, match="planted fault"):
        play(pool, source=episodes(20))
    assert len(set(pool.started)) <= 3 + MAX_BAD_STARTS


def test_so_does_one_that_fails_at_the_few_starts_that_there_are():
    pool = FakePool(lambda _, state: Script(8, faults=99), num_slots=2)
    with pytest.raises(RuntimeError, match="planted fault"):
        play(pool, source=(replace(one, init_state_id=one.index % 4) for one in episodes(60)), n_steps=40)


# what is recorded


def test_the_warmup_is_all_teacher_and_records_its_greedy_tokens_only():
    policy = FakePolicy(adapter_scale=1.0)
    collected = play(FakePool(lengths_script(9)), Behaviour(1.0, 1.0), n_steps=20, policy=policy)
    for d in (d for t in collected.trajectories for d in t.decisions):
        assert torch.equal(d.tokens, policy.act_as_teacher([d.observation]).tokens[0])
        assert d.by_teacher
        assert d.student_logprobs is None


def test_the_students_logprobs_are_recorded_for_every_decision_also_for_those_of_the_teacher():
    policy = FakePolicy(adapter_scale=0.5)
    behaviour = Behaviour(0.5, 1.6, record_student_logprobs=True)
    generators = [torch.Generator().manual_seed(i) for i in range(40)]
    decisions, _ = decide(policy, random_observations(40), generators, [0.5] * 40, behaviour)
    assert 0 < sum(d.by_teacher for d in decisions) < 40
    for d in decisions:
        expected = token_logprobs(policy.chunk_logits([d.observation]), d.tokens[None], 1.6)[0]
        assert torch.equal(d.student_logprobs, expected)
        assert not d.student_logprobs.requires_grad


# who decides, and from which numbers


@pytest.mark.parametrize("num_slots", [1, 4])
def test_epsilon_falls_over_the_env_steps_of_a_rollout_by_the_place_of_a_decision(num_slots):
    """Not by timing. With the expected length of the episodes it is that of the env steps played."""
    ramp = Behaviour(1.0, 1.0, record_student_logprobs=True, epsilon_fall=1 / 4000, episode_length=20)
    results = [
        play(FakePool(lengths_script(12, 28), slots, order), ramp, n_steps=5000)
        for slots, order in ((num_slots, None), (num_slots, 0), (3, 7))
    ]
    common = min(len(collected.trajectories) for collected in results)
    first, *others = (contents(collected.trajectories)[:common] for collected in results)
    assert all(other == first for other in others)
    for start, expected in ((0, 0.875), (50, 0.625), (100, 0.375), (150, 0.125), (200, 0.0)):
        episodes_of_part = results[0].trajectories[start : start + 50]  # 1,000 env steps
        by_teacher = [d.by_teacher for t in episodes_of_part for d in t.decisions]
        assert np.mean(by_teacher) == pytest.approx(expected, abs=0.1)


@given(max_batch=st.integers(1, 5), orders=st.integers(0, 99))
def test_how_decisions_are_batched_changes_nothing_but_the_batches(max_batch, orders):
    policy = FakePolicy()
    pool = FakePool(lengths_script(25, 3, 9, 14), num_slots=4, order_seed=orders)
    collected = play(pool, source=episodes(9), policy=policy, max_batch=max_batch)
    alone = play(FakePool(lengths_script(25, 3, 9, 14)), source=episodes(9))
    assert contents(collected.trajectories) == contents(alone.trajectories)
    assert max(size for _, size in policy.modes) <= max_batch


# randomness


def test_generators_are_a_function_of_every_part_of_their_key_and_of_nothing_else():
    def draw(*key) -> int:
        return torch.randint(2**62, (1,), generator=torch_generator(*key)).item()

    state = torch.get_rng_state()
    keys = itertools.product((0, 1, 2**40), ("rollout", "evaluation"), (0, 1, 500), (0, 1, 500))
    drawn = [draw(*key) for key in keys]
    assert len({*drawn, draw(0, "rollout", 0)}) == 54 + 1
    assert draw(0, "rollout", 0, 0) == drawn[0]
    assert torch.equal(torch.get_rng_state(), state)


# memory


def test_a_rollout_that_runs_out_of_memory_goes_on_with_fewer_decisions_at_once():
    policy = FakePolicy()
    policy.room = 1
    collected = play(FakePool(lengths_script(10), num_slots=4), source=episodes(6), policy=policy)
    roomy = play(FakePool(lengths_script(10), 4), source=episodes(6))
    assert contents(collected.trajectories) == contents(roomy.trajectories)
    policy.modes.clear()
    play(FakePool(lengths_script(10), num_slots=4), source=episodes(6), policy=policy)
    assert {size for _, size in policy.modes} == {1}  # a later rollout does not run out of memory again
    policy.room = 0
    with pytest.raises(BadInput, match="--max-batch"):
        play(FakePool(lengths_script(10)), source=episodes(1), policy=policy)
