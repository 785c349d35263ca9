"""The start of a run or an evaluation beside what others report for its checkpoint."""

import json
import re
from pathlib import Path

import pytest

from configs.presets import PUBLIC_CHECKPOINTS, TINY_CHECKPOINT
from experiment.reported import REPORTS, compare_with_reports, hub_id_of
from experiment.statistics import Successes

SPATIAL = PUBLIC_CHECKPOINTS["libero_spatial"]
L1 = "moojink/openvla-7b-oft-finetuned-libero-goal"
ALL_TASKS = range(10)


def is_below(checkpoint: str, suite: str, task_ids, k: int, n: int, mode: str = "greedy") -> bool | None:
    comparison = compare_with_reports(checkpoint, suite, task_ids, mode, Successes(k, n), "lowpoly (abc)")
    return None if comparison is None else comparison.is_below


@pytest.mark.parametrize(
    ("k", "n", "below"),
    [
        (12, 50, True),  # 24 % [14, 37]; 64 and 57 % are reported
        (24, 50, False),  # 48 % [35, 61] holds the lower one
        (250, 500, True),  # 50 % [46, 54]
        (265, 500, False),  # 53 % [49, 57]
        (480, 500, False),  # more than reported
        (0, 10, True),
    ],
)
def test_a_start_is_below_if_its_interval_ends_below_the_lowest_reported_rate(k, n, below):
    assert is_below(SPATIAL, "libero_spatial", ALL_TASKS, k, n) is below


def test_a_report_on_the_one_task_of_a_run_counts_in_place_of_the_suites_mean():
    assert is_below(SPATIAL, "libero_spatial", (1,), 30, 50) is False
    assert (
        is_below(SPATIAL, "libero_spatial", (0,), 30, 50) is True
    )  # 60 % [46, 72]; 88 % are reported on task 0
    assert is_below(SPATIAL, "libero_spatial", (0, 1), 30, 50) is False


def test_only_what_was_measured_as_reported_is_compared():
    assert is_below(SPATIAL, "libero_goal", ALL_TASKS, 0, 50) is None
    assert is_below(TINY_CHECKPOINT, "libero_spatial", (0,), 0, 50) is None
    assert is_below(SPATIAL, "libero_spatial", ALL_TASKS, 0, 50, mode="sample") is None
    assert is_below(L1, "libero_goal", ALL_TASKS, 0, 50, mode="greedy") is None  # its token head is untrained
    assert is_below(L1, "libero_goal", ALL_TASKS, 300, 500, mode="l1") is True


def test_the_sentence_says_what_was_measured_what_is_reported_and_what_to_look_at():
    def sentence(k: int) -> str:
        return compare_with_reports(
            SPATIAL, "libero_spatial", (0,), "greedy", Successes(k, 50), "lowpoly (abc)"
        ).sentence

    for k in (12, 45):
        assert f"{k}/50" in sentence(k)
        assert SPATIAL in sentence(k)
        assert "88 % (one user) on task 0" in sentence(k)
        assert "63.6 % (SimpleVLA-RL) and 56.5 % (RLinf)" in sentence(k)
        assert "\n" not in sentence(k)
    for clue in ("lowpoly (abc)", "--assets", "first_frame.png", "--check-only", "docs/TROUBLESHOOTING.md"):
        assert clue in sentence(12)
        assert clue not in sentence(45)


def test_a_checkpoint_is_known_by_its_id_by_its_place_in_the_cache_or_by_its_folders_name(
    tmp_path, monkeypatch
):
    name = SPATIAL.split("/")[1]
    cached = tmp_path / "hub" / f"models--{SPATIAL.replace('/', '--')}" / "snapshots" / "abc"
    copied = tmp_path / name
    mine = tmp_path / "mine"
    adapter = tmp_path / "adapter"
    for folder in (cached, copied, mine, adapter):
        folder.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": SPATIAL}))
    for checkpoint in (SPATIAL, cached, copied):
        assert hub_id_of(str(checkpoint)) == SPATIAL
    monkeypatch.chdir(copied)
    assert hub_id_of(".") == SPATIAL
    for checkpoint in (mine, adapter, f"somebody/{name}", TINY_CHECKPOINT):
        assert hub_id_of(str(checkpoint)) is None


def test_the_table_of_the_readme_has_these_rates():
    readme = Path(__file__).parents[1].joinpath("README.md").read_text()
    for suite, hub_id in PUBLIC_CHECKPOINTS.items():
        (row,) = re.findall(rf"\| `{suite}` \| `{hub_id}` \| (.*) \|", readme)
        rates = sorted(100 * report.rate for report in REPORTS[hub_id, suite])
        assert sorted(map(int, re.findall(r"(\d+) %", row))) == pytest.approx(rates, abs=0.51)
