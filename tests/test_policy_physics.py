"""Which conditions a policy plays to separate starts, physics and sampling, and which of them are compared."""

from benchmarks.policy_physics import CONDITIONS, Args, fresh_episodes, paired_rows, play, print_tables
from experiment.statistics import Paired
from tests.fakes import FakePolicy, FakePool, Script

OFFICIAL, EXACT, FAST, SAMPLED = CONDITIONS
ARGS = Args("unused", task_ids=(0, 1), episodes=3, official_states=2)


def fails_task_1_in_fast_physics(num_slots: int) -> FakePool:
    def script(task_id: int, _: int) -> Script:
        return Script(9, success=task_id == 0 or pool.physics[-1] == "exact")

    pool = FakePool(script, num_slots, order_seed=num_slots)
    return pool


def test_each_condition_plays_its_states_in_its_physics_and_mode():
    pool = fails_task_1_in_fast_physics(num_slots=1)
    official = [(task, state) for task in (0, 1) for state in (0, 1)]
    fresh = [(task, seed) for task in (0, 1) for seed in (0, 1, 2)]
    for condition, starts, physics, actor in [
        (OFFICIAL, official, "exact", "student greedy"),
        (EXACT, fresh, "exact", "student greedy"),
        (FAST, fresh, "fast", "student greedy"),
        (SAMPLED, fresh, "fast", "student sample"),
    ]:
        policy = FakePolicy()
        pool.started.clear()
        pool.physics.clear()
        outcomes = play(policy, pool, condition, ARGS)
        assert pool.started == starts
        assert set(pool.physics) == {physics}
        assert {name for name, _ in policy.modes} == {actor}
        assert [episode.init_state_id is None for episode in outcomes] == [starts is fresh] * len(starts)


def test_the_tables_count_all_episodes_and_pair_the_fresh_ones(capsys):
    for num_slots in (1, 3):
        pool = fails_task_1_in_fast_physics(num_slots)
        print_tables(FakePolicy(), pool, ARGS)
        successes, pairs = capsys.readouterr().out.split("\n\n")
        rates = [row.split(" | ")[1] for row in successes.splitlines()[2:]]
        assert [rate.split(" ")[0] for rate in rates] == ["4/4", "6/6", "3/6", "3/6"]
        lost_in_fast = Paired(both=3, only_before=3, only_after=0, neither=0)
        unchanged = Paired(both=3, only_before=0, only_after=0, neither=3)
        assert pairs.splitlines()[2:] == [
            f"| {EXACT} | {FAST} | 6: solved in both 3, only in A 3, only in B 0 | {lost_in_fast} |",
            f"| {EXACT} | {SAMPLED} | 6: solved in both 3, only in A 3, only in B 0 | {lost_in_fast} |",
            f"| {FAST} | {SAMPLED} | 6: solved in both 3, only in A 0, only in B 0 | {unchanged} |",
        ]


def test_episodes_are_paired_by_task_and_seed():
    episodes = fresh_episodes((0, 1), 2)
    before = dict(zip(episodes, [True, False, True, False], strict=True))
    after = dict(zip(reversed(episodes), [True, False, False, True], strict=True))
    (row,) = paired_rows({EXACT: before, FAST: after})
    assert "4: solved in both 1, only in A 1, only in B 1" in row
