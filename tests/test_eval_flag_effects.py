"""No flag of eval.py is without effect: each is changed alone, and what it did differs where the table says."""

from dataclasses import fields

import pytest

import eval as eval_program
from configs.config import EvalConfig
from tests.flag_world import Case, World
from tests.small_checkpoint import make_small_checkpoint

SIMULATORS = "--num-envs 3"
SAMPLED = "--mode sample"

CASES = [
    Case("--checkpoint {another}", "played"),
    Case("--compare-with {another}", "files"),
    Case("--protocol libero", "ended: leave out --trials 8, --task-ids"),
    Case("--task-suite libero_goal", "played"),
    Case("--task-ids 1 2", "played"),
    Case("--bddl-file own.bddl", "ended: BDDL file not found: own.bddl"),
    Case("--trials 9", "played"),
    Case("--first-init-state 5", "played"),
    Case("--mode sample", "played"),
    Case("--temperature 3", "played", SAMPLED),
    Case("--unnorm-key bridge_orig", "ended: bridge_orig"),
    Case("--num-envs 3", "batches"),
    Case("--max-batch 1", "batches", SIMULATORS),
    Case("--assets nowhere", "ended: nowhere is no LIBERO asset folder"),
    Case("--device cuda", "ended: no CUDA GPU is visible"),
    Case("--compile on", "compiled"),
    Case("--data-parallel", "log: --data-parallel: there is one device (cpu)"),
    Case("--dtype bfloat16", "settings: bfloat16"),
    Case("--load-in-4bit", "settings: nf4, float32"),
    Case("--seed 1", "played", SAMPLED),
    Case("--out elsewhere.json", "files"),
    Case("--video all", "files"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs an evaluation; {one} and {another} are checkpoints."""
    folder = tmp_path_factory.mktemp("flags")
    names = {"one": 0, "another": 1}
    checkpoints = {name: make_small_checkpoint(folder / name, num_images=1, seed=seed) for name, seed in names.items()}
    world = World(folder)
    base = "--checkpoint {one} --task-ids 0 --trials 8"
    return lambda flags: world.run(eval_program, f"{base} {flags}".format(**checkpoints).split())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.flag)
def test_a_changed_flag_makes_the_difference_of_the_table(case, run):
    if case.flag == "load_in_4bit":
        pytest.importorskip("bitsandbytes", reason=f"an optional package that {case.changed} needs is missing")
    before, after = run(case.given), run(f"{case.given} {case.changed}")
    assert before.part(case.seen) != after.part(case.seen)
    if case.flag != "protocol":  # which contradicts others and is refused
        changed = {name for name, value in after.part("config").items() if before.part("config")[name] != value}
        assert changed == {case.flag}


def test_without_a_changed_flag_there_is_no_difference(run):
    before, after = run(SAMPLED), run(f"{SAMPLED} --seed 0")
    for case in CASES:
        assert before.part(case.seen) == after.part(case.seen), case.seen


def test_every_flag_has_its_case():
    assert {case.flag for case in CASES} == {field.name for field in fields(EvalConfig)}
