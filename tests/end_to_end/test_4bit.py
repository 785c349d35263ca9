"""`--load-in-4bit` through the command lines: a run keeps it when it goes on, and its checkpoints are evaluated so."""

import json

import pytest

import eval as eval_program
import train_grpo
from envs.tasks import MAX_ENV_STEPS
from errors import BadInput
from tests.end_to_end.conftest import only_run
from tests.end_to_end.test_resume import metrics_of, weights_of

pytest.importorskip("bitsandbytes", reason="an optional package that --load-in-4bit needs is not installed")


def test_a_run_in_4_bits_learns_stays_so_when_resumed_and_is_evaluated_so(smoke, tmp_path, monkeypatch):
    monkeypatch.setitem(MAX_ENV_STEPS, "libero_spatial", 16)
    train_grpo.main([*smoke, "--load-in-4bit", "--total-steps", "32"])
    run = only_run(smoke)
    before = weights_of(run)
    with pytest.raises(BadInput, match=r"load_in_4bit \(run: True, now: False\)"):
        train_grpo.main(["--resume", str(run), "--no-load-in-4bit"])
    train_grpo.main(["--resume", str(run), "--total-steps", "64"])
    assert (run / "train.log").read_text().count("of them in 4 bits (NF4)") == 2
    updates = [row for row in metrics_of(run) if "train/optimizer_steps" in row]
    assert [row["global_step"] for row in updates] == [32, 64]
    assert all(row["train/optimizer_steps"] > 0 for row in updates)
    assert any((tensor != before[name]).any() for name, tensor in weights_of(run).items())

    out = tmp_path / "results.json"
    checkpoint = str(run / "checkpoints" / "latest")
    eval_program.main(["--checkpoint", checkpoint, "--task-id", "0", "--trials", "1", "--out", str(out)])
    assert json.loads(out.read_text())["settings"]["dtype"] == "nf4, float32"
