"""Fine-tuning as a whole: from files of demonstrations to a policy that acts as they do."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from contracts import Observation
from errors import BadInput
from tests.demo_episodes import raw_images, write_demos
from tests.small_checkpoint import SMALL
from vla.policy import Policy
from vla.settings import LearnerSettings, SftArgs, TinySize
from vla.sft import fine_tune, main
from vla.sft_learner import Learner
from vla.sft_report import read_records
from vla.tokens import FIRST_ACTION_TOKEN

MEMORISING = LearnerSettings(steps=250, batch_size=8, lr=6e-3, warmup_steps=20, augment=False, proprio_noise=0.0)
BRIEF = LearnerSettings(steps=4, batch_size=4, warmup_steps=1)
WIDER = replace(SMALL, llm_dim=32, llm_heads=2, llm_mlp_dim=64)


def _args(demos: Path, out: Path, learner: LearnerSettings = BRIEF, **changes) -> SftArgs:
    options = {"size": SMALL, "holdout": 0.0, "log_every": 2, "eval_every": 4, "device": "cpu", "workers": 1} | changes
    return SftArgs(demos=(demos,), out=out, learner=learner, **options)


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """(folder, the episodes): two episodes of four frames."""
    folder = tmp_path_factory.mktemp("demos")
    return folder, write_demos(folder)


@pytest.fixture(scope="module")
def memorised(demos, tmp_path_factory):
    """A policy trained on the two episodes until it knows them."""
    args = _args(demos[0], tmp_path_factory.mktemp("sft") / "memorised", MEMORISING, size=WIDER)
    return fine_tune(replace(args, log_every=50, eval_every=50))


def _observations(episodes) -> list[Observation]:
    return [
        Observation(images, proprio.astype(np.float64), episode.instruction)
        for i, episode in enumerate(episodes)
        for images, proprio in zip(raw_images(i), episode.proprio, strict=True)
    ]


def test_training_drives_the_loss_down(memorised):
    losses = [record["loss"] for record in read_records(memorised)]
    assert losses[0] > 3
    assert losses[-1] < 0.1


def test_the_policy_acts_as_the_demonstrations_that_it_memorised(demos, memorised):
    policy = Policy.load(str(memorised), task_suite="libero_spatial")
    actions = policy.act(_observations(demos[1]), "greedy").actions
    labels = np.concatenate([[e.actions[step : step + 8] for step in e.frame_steps] for e in demos[1]])
    low, high = policy.statistics.action.q01[:6], policy.statistics.action.q99[:6]
    assert (np.abs(actions[..., :6] - np.clip(labels[..., :6], low, high)) <= (high - low) / 255 + 1e-6).all()
    np.testing.assert_array_equal(actions[..., 6], labels[..., 6])


@torch.no_grad()
def test_an_argmax_over_the_whole_vocabulary_finds_the_same_tokens(demos, memorised):
    policy = Policy.load(str(memorised), task_suite="libero_spatial")
    logits, hidden = policy.chunk_outputs(_observations(demos[1]))
    everywhere = policy.network.vocabulary_logits(hidden).argmax(-1)
    assert torch.equal(everywhere, logits.argmax(-1) + FIRST_ACTION_TOKEN)


def test_the_folder_holds_everything(demos, tmp_path):
    args = _args(demos[0], tmp_path / "out", holdout=0.5, checkpoint_at=(2,), save_dtype="float32")
    fine_tune(args)
    assert {path.name for path in args.out.iterdir()} == {
        "README.md", "config.json", "dataset_statistics.json", "generation_config.json", "model.safetensors",
        "preprocessor_config.json", "proprio_projector--latest_checkpoint.pt", "sft_curves.png", "sft_metrics.jsonl",
        "sft_run.json", "step_000002", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert [record["step"] for record in read_records(args.out)] == [2, 4]
    assert "held_out/nll" in read_records(args.out)[-1]
    run = json.loads((args.out / "sft_run.json").read_text())
    assert (run["steps"], run["data"]["train_episodes"], run["data"]["held_out_episodes"]) == (4, 1, 1)
    early = Policy.load(str(args.out / "step_000002"), task_suite="libero_spatial")
    assert early.num_images == 2
    assert json.loads((args.out / "step_000002" / "sft_run.json").read_text())["steps"] == 2
    assert "2 steps of 4 frames" in (args.out / "step_000002" / "README.md").read_text()


def test_a_seed_repeats_the_files_weights(demos, tmp_path):
    outs = [fine_tune(_args(demos[0], tmp_path / str(i))) for i in range(2)]
    assert outs[0].joinpath("model.safetensors").read_bytes() == outs[1].joinpath("model.safetensors").read_bytes()
    other = fine_tune(_args(demos[0], tmp_path / "other", replace(BRIEF, seed=1)))
    assert other.joinpath("model.safetensors").read_bytes() != outs[0].joinpath("model.safetensors").read_bytes()


def test_training_goes_on_from_a_checkpoint(demos, memorised, tmp_path):
    learner = replace(MEMORISING, steps=1, lr=1e-9, warmup_steps=0)
    options = {"init": str(memorised), "size": TinySize(), "log_every": 1, "eval_every": 1}
    out = fine_tune(_args(demos[0], tmp_path / "out", learner, **options))
    assert read_records(out)[0]["loss"] < 0.2
    before, after = (load_file(folder / "model.safetensors") for folder in (memorised, out))
    assert before.keys() == after.keys()
    torch.testing.assert_close(after["projector.fc1.weight"], before["projector.fc1.weight"])


def test_ctrl_c_saves_what_there_is(demos, tmp_path, monkeypatch, capsys):
    step = Learner.step

    def interrupted(learner: Learner, number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt
        step(learner, number)

    monkeypatch.setattr(Learner, "step", interrupted)
    out = fine_tune(_args(demos[0], tmp_path / "out"))
    assert "interrupted" in capsys.readouterr().out
    start = fine_tune(_args(demos[0], tmp_path / "start", max_minutes=0.0))  # ends after one step
    assert [record["step"] for record in read_records(out)] == [2]
    assert read_records(start) == []
    for folder in (out, start):
        assert Policy.load(str(folder), task_suite="libero_spatial").kind == "action tokens"
    assert out.joinpath("model.safetensors").read_bytes() != start.joinpath("model.safetensors").read_bytes()


def test_a_loss_that_is_not_finite_ends_the_training(demos, tmp_path):
    learner = replace(BRIEF, lr=1e30, warmup_steps=0)
    with pytest.raises(BadInput, match="--lr"):
        fine_tune(_args(demos[0], tmp_path / "out", learner))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"holdout": 1.0}, "--holdout"),
        ({"log_every": 0}, "--log-every"),
        ({"eval_every": 3}, "--eval-every"),
        ({"checkpoint_at": (5,)}, "--checkpoint-at"),
        ({"workers": 0}, "--workers"),
        ({"device": "gpu"}, "--device"),
        ({"size": replace(SMALL, patch_size=15)}, "--size.image-size"),
        ({"init": "somewhere"}, "--size"),
        ({"learner": replace(BRIEF, steps=0)}, "--steps"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_is_written(demos, tmp_path, changes, flag):
    with pytest.raises(BadInput, match=flag):
        fine_tune(_args(demos[0], tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_never_written_to(demos, tmp_path):
    with pytest.raises(BadInput, match="--out"):
        fine_tune(_args(demos[0], tmp_path))


def test_the_command_line_says_in_one_line_what_is_wrong(tmp_path):
    argv = ["--demos", str(tmp_path), "--out", str(tmp_path / "out"), "--size.image-size", "32",
            "--size.patch-size", "16", "--size.llm-dim", "16", "--steps", "3", "--device", "cpu"]  # fmt: skip
    with pytest.raises(BadInput, match="no demonstrations") as refused:
        main(argv)
    assert "\n" not in str(refused.value)
