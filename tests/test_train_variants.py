"""Variants are trained and played once, and are compared only if they were measured alike."""

import json
import shlex
from itertools import accumulate, chain
from pathlib import Path

import pytest

from benchmarks import compare, train_variants
from contracts import BadInput
from tests.stored_runs import evaluation, store


def test_every_seed_of_every_variant_is_trained_once_and_played_with_its_start(tmp_path, monkeypatch):
    programs = []

    def pretend(logs: dict[Path, list[str]], at_once: int) -> None:
        for command in chain(*logs.values()):
            programs.append(command)
            if "--output" in command:
                _, *argv = shlex.split(command)
                folder = Path(argv[argv.index("--output") + 1]) / "run"
                settings = {"phases__total_steps": 10, "rollout__temperature": 0.7}
                store(folder, [evaluation(10)], argv=argv, **settings)

    monkeypatch.setattr(train_variants, "run_side_by_side", pretend)
    monkeypatch.setattr(train_variants.collect, "main", lambda _: None)
    flags = [str(tmp_path), "a --preset tiny", "b --preset tiny --lr 1", "--seeds", "3", "4"]
    train_variants.main(flags)
    trained = [one for one in programs if one.startswith("train_grpo.py")]
    played = [one for one in programs if one.startswith("eval.py")]
    assert len(trained) == 4
    assert sum("--lr 1 --seed 4" in one for one in trained) == 1
    assert sum("--mode greedy sample" in one and "--temperature 0.7" in one for one in played) == 6
    assert sum("checkpoints/latest" in one for one in played) == 4
    assert sum("--checkpoint checkpoints/tiny-libero-spatial" in one for one in played) == 2
    assert all("--l1-student laplace" in one and "--assets auto" in one for one in played)

    programs.clear()
    train_variants.main(flags)
    assert all(one.startswith("eval.py") for one in programs)
    with pytest.raises(BadInput, match="other flags"):
        train_variants.main([flags[0], "a --preset tiny --lr 2"])


def test_successes_of_two_simulators_are_not_compared(tmp_path):
    files = [tmp_path / "base.json", tmp_path / "other.json"]
    for file in files:
        results = {"seed": None, "world": f"mujoco of {file.stem}", "successes": {}}
        file.write_text(json.dumps({"runs": [], "results": [results]}))
    with pytest.raises(BadInput, match="mujoco of base; mujoco of other"):
        compare.main([str(file) for file in files])


def experiment_of(successes: dict[int, str], rollouts: list[tuple[int, float]]) -> dict:
    """A collected experiment: of each seed what the end solved, and rollouts of so many env steps and such success."""
    seconds = [steps / 10 for steps, _ in rollouts]
    updates = {
        "global_step": list(accumulate(steps for steps, _ in rollouts)),
        "rollout/success_rate": [rate for _, rate in rollouts],
        "rollout/trajectories": [2 for _ in rollouts],
        "rollout/teacher_fraction": [0.0 for _ in rollouts],
        "rollout/time_s": seconds,
        "time/update": seconds,
    }
    runs = []
    for seed, solved in successes.items():
        end = {"global_step": 0, "successes": {"sample": {"task": solved}, "greedy": {"task": solved}}}
        runs.append({"seed": seed, "world": "mujoco", "updates": updates, "evaluations": [end]})
    return {"runs": runs, "results": []}


def test_variants_are_compared_over_seeds_that_both_have_to_the_end_of_the_shorter():
    base = experiment_of({0: "11", 1: "11", 2: "00"}, [(30, 0.5), (30, 1.0)])
    variant = experiment_of({0: "11", 1: "11"}, [(60, 0.5), (60, 1.0)])
    for each in (base, variant):
        values = compare.measure(each, 45, {0, 1})
        assert values["sampled"] == {0: 1.0, 1: 1.0}
        assert values["sampled by state"] == {("task", 0): 1.0, ("task", 1): 1.0}
        assert values["minutes"][0] == pytest.approx(45 / 5 / 60)
        assert values["area"][0] == pytest.approx(2 / 3 if each is base else 0.5)


def test_a_file_of_runs_that_lacks_a_field_is_refused(tmp_path):
    experiment = experiment_of({0: "11"}, [(8, 0.5)])
    file = tmp_path / "base.json"
    file.write_text(json.dumps(experiment))
    compare.main([str(file)])
    del experiment["runs"][0]["updates"]["global_step"]
    file.write_text(json.dumps(experiment))
    with pytest.raises(BadInput, match="global_step"):
        compare.main([str(file)])
