"""Comparisons of variants with equal seeds: curves, p values and intervals with known values, and censored runs."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.learning_report import WINDOW, learning_curve, trailing_success
from benchmarks.paired_runs import (
    Value,
    area_under_curve,
    compare,
    holm,
    mean_interval,
    sign_flip_p,
    summarise,
    write_table,
)
from contracts import BadInput
from experiment.statistics import Successes

TO_75 = "env steps to 75 %"


def update(env_steps: int, k: int, n: int = WINDOW) -> dict:
    """The record of an update, with a rollout of 30 s and an update of as long, in which k of n episodes succeeded."""
    rollout = {"rollout/success_rate": k / n, "rollout/trajectories": n, "rollout/time_s": 30.0}
    return {"global_step": env_steps, "update": 0, "time/update": 30.0, **rollout}


def evaluation(env_steps: int, k: int, n: int = 50) -> dict:
    return {"global_step": env_steps, "update": 0, **Successes(k, n).metrics("eval/student_success")}


LINE = [update(10_000 * i, 5 * i) for i in range(1, 11)]  # success env_steps / 100,000


# the curve of a run


def test_the_area_of_a_straight_line():
    points = learning_curve(LINE)
    # A constant of 0.1 up to the first update, then the line.
    assert area_under_curve(points, 100_000) == pytest.approx(0.1 * 0.1 + (1 - 0.1**2) / 2)
    assert area_under_curve(points, 45_000) == pytest.approx((0.01 + (0.45**2 - 0.1**2) / 2) / 0.45)
    assert area_under_curve(points, 5_000) == pytest.approx(0.1)


def test_a_constant_has_its_height_as_area_whatever_the_horizon():
    points = learning_curve([update(env_steps, 20) for env_steps in (3_001, 7_500, 11_000)])
    for horizon in (1, 3_001, 5_000, 11_000):
        assert area_under_curve(points, horizon) == pytest.approx(0.4)


def test_of_an_update_that_the_window_cuts_each_episode_counts_as_its_mean():
    older, newer = Successes(15, 30), Successes(30, 30)
    assert trailing_success([older, newer]) == (50, pytest.approx((20 * 0.5 + 30) / 50))
    assert trailing_success([Successes(0, 10), older, newer]) == (50, pytest.approx(0.8))
    assert trailing_success([older]) == (30, 0.5)
    assert trailing_success([older, Successes(90, 120)]) == (120, 0.75)


def test_env_steps_to_a_level_are_those_of_the_first_whole_window():
    lucky_start = [update(1_000, 10, n=10), update(3_000, 20, n=40), update(9_000, 38, n=50)]
    summary = summarise(lucky_start, horizon=9_000)
    assert summary["env steps to 50 %"].value == 3_000  # 30 of 50; after 1,000 there were only 10 episodes
    assert summary[TO_75].value == 9_000


def test_a_run_that_did_not_arrive_is_censored_at_its_last_env_step():
    value = summarise(LINE[:6], horizon=100_000)[TO_75]
    assert value == Value(None, "> 60,000", censored_at=60_000)


def test_a_short_run_has_no_area_minutes_and_greedy_success():
    short = summarise([evaluation(0, 10), *LINE[:6], evaluation(60_000, 20)], horizon=70_000)
    assert [short[measure].value for measure in ("area", "minutes", "greedy")] == [None] * 3
    whole = summarise([evaluation(0, 10), *LINE, evaluation(100_000, 40)], horizon=70_000)
    assert [whole[measure].value for measure in ("minutes", "greedy")] == [7.0, 0.8]


def test_a_run_without_updates_is_no_error():
    assert summarise([], horizon=100)[TO_75].text == "> 0"


# statistics


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([0.1, 0.3, 0.2, 0.4], 2 / 16),  # all of one sign: the least that 4 pairs can give
        ([-1.0] * 10, 2 / 1024),
        ([1, 1, 1, -1], 10 / 16),  # 2 sums of +-4 and 8 of +-2
        ([0.1, 0.2, -0.3], 1),
        ([4, 3, 2, -1], 4 / 16),  # 8 and 10, and their opposites
        ([0, 0], 1),
        ([], 1),
    ],
)
def test_sign_flip_is_exact(differences, p):
    assert sign_flip_p(differences) == p


def test_holm_has_the_values_of_r():
    # R: p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([]) == []


def test_the_interval_is_that_of_the_paired_t_distribution():
    # 1, 2, 3: mean 2, standard error 1 / sqrt(3); the quantile of 2 degrees of freedom is 4.3027.
    assert mean_interval([1, 2, 3]) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)
    assert mean_interval([1]) is None


def arrived(env_steps: int) -> Value:
    return Value(env_steps, "")


def censored(env_steps: int) -> Value:
    return Value(None, "", env_steps)


def test_env_steps_are_compared_by_the_ratio_of_geometric_means():
    pairs = [
        (arrived(10_000 * i), arrived(5_000 * i * factor)) for i, factor in ((1, 1), (7, 2), (3, 1), (5, 2))
    ]
    comparison = compare("half", TO_75, pairs)
    assert comparison.estimate == pytest.approx(2**-0.5)
    half_width = 3.1824 * math.log(2) / 3**0.5 / 2  # differences of the logs: -log 2 and 0, twice each
    low, high = comparison.interval
    assert math.log(high / low) / 2 == pytest.approx(half_width, rel=1e-4)
    assert (comparison.complete, comparison.pairs, comparison.test) == (4, 4, "sign-flip")
    assert comparison.p == 2 / 4  # of the two that differ


def test_censored_pairs_are_counted_and_never_imputed():
    complete = [(arrived(40_000), arrived(20_000))] * 6
    only_variant = [(censored(100_000), arrived(90_000))] * 2
    only_first = [(arrived(50_000), censored(100_000))]
    # Nobody arrived, or nobody knows when the run that was stopped early would have.
    unknown = [(censored(100_000), censored(100_000)), (censored(30_000), arrived(60_000))]
    comparison = compare("variant", TO_75, complete + only_variant + only_first + unknown)
    assert comparison.estimate == pytest.approx(0.5)
    assert (comparison.complete, comparison.pairs) == (6, 11)
    assert comparison.test == "sign: earlier in 8, later in 1"
    assert comparison.p == pytest.approx(2 * (1 + 9) / 2**9)


def test_without_a_complete_pair_there_is_no_ratio_but_the_order_counts():
    comparison = compare("variant", TO_75, [(censored(100_000), arrived(90_000))] * 6)
    assert (comparison.estimate, comparison.interval) == (None, None)
    assert comparison.p == 2 / 2**6


# the table


def store(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_table_pairs_runs_of_equal_seeds_from_files_and_run_folders(tmp_path):
    better = [update(10_000 * i, min(50, 5 * i + 10)) for i in range(1, 11)]
    for seed in (0, 1, 2):
        store(tmp_path / f"zero/seed_{seed}.jsonl", LINE)
    for seed in (1, 2, 3):
        run = tmp_path / f"better/seed_{seed}/20260101-run"
        store(run / "metrics.jsonl", [*better, evaluation(100_000, 45)])
        (run / "config.json").write_text("{}")
    store(tmp_path / "slow/seed_1.jsonl", LINE[:6])
    markdown = write_table(tmp_path, "zero", horizon=100_000)
    assert markdown + "\n" == (tmp_path / "table.md").read_text()
    contents = json.loads((tmp_path / "table.json").read_text())
    assert list(contents["runs"]) == ["zero", "better", "slow"]
    results = {(c["variant"], c["measure"]): c for c in contents["comparisons"]}
    assert results["better", TO_75]["estimate"] == pytest.approx(6 / 8)
    assert (results["better", TO_75]["complete"], results["better", TO_75]["pairs"]) == (2, 2)
    assert results["better", TO_75]["p"] == 0.5
    assert (results["slow", TO_75]["complete"], results["slow", TO_75]["p_holm"]) == (0, 1)
    assert results["better", "greedy"]["estimate"] is None  # the first variant was not evaluated
    assert "> 60,000" in markdown
    assert "45/50" in markdown


def test_a_folder_without_runs_and_an_unknown_first_variant_are_refused(tmp_path):
    with pytest.raises(BadInput, match=str(tmp_path)):
        write_table(tmp_path, None, horizon=100)
    store(tmp_path / "some/seed_0.jsonl", LINE)
    with pytest.raises(BadInput, match="--first"):
        write_table(tmp_path, "other", horizon=100)
