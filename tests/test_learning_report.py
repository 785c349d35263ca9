"""The tables of the learning benchmark add up what the runs recorded."""

import json

from benchmarks.learning_report import compare, plot, read_variants, table


def rows(sampled: list[int], seconds: float) -> str:
    """Evaluations with `sampled` of 60 and a greedy 10 of 20, and a warmup update between the first two."""
    update = {
        "global_step": 50, "schedule/phase": 0, "rollout/time_s": seconds, "time/update": 1.0,
        "rollout/success_rate": 0.5,
    }  # fmt: skip
    greedy = {"eval/student_success": 0.5, "eval/student_success_k": 10, "eval/student_success_n": 20}
    name = "eval/student_sampled_success"
    evaluations = [
        {"global_step": 100 * i, **greedy, name: k / 60, f"{name}_k": k, f"{name}_n": 60} for i, k in enumerate(sampled)
    ]
    return "".join(json.dumps(row) + "\n" for row in (evaluations[0], update, *evaluations[1:]))


def test_counts_of_all_seeds_are_added_and_changes_kept_apart(tmp_path):
    for seed, (sampled, seconds) in enumerate((([27, 50, 45], 10.0), ([27, 1, 36], 30.0))):
        (tmp_path / "default").mkdir(exist_ok=True)
        (tmp_path / "default" / f"seed_{seed}.jsonl").write_text(rows(sampled, seconds))
    (tmp_path / "scratch").mkdir()
    (variant,) = read_variants(tmp_path)
    assert (variant.name, len(variant.seeds)) == ("default", 2)
    assert [variant.counts("eval/student_sampled_success", which).k for which in (0, -1)] == [54, 81]
    assert [round(change) for change in variant.changes("eval/student_sampled_success")] == [30, 15]
    assert [variant.seconds(phase) for phase in range(2)] == [21.0, 0.0]
    assert "54/120 = 45 %" in table([variant])
    assert "+30, +15" in table([variant])
    compare([variant], tmp_path / "comparison.png")
    plot(variant, tmp_path / "default.png")
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("comparison.png", "default.png"))
