"""Fine-tuning as a whole: from files of demonstrations to a policy that acts as they do."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import workshop.sft
from contracts import BadInput, Observation
from tests.demo_episodes import raw_images, write_demos
from tests.small_checkpoint import SMALL, make_small_checkpoint
from vla.checkpoint import inspect_checkpoint
from vla.policy import Policy
from vla.tokens import FIRST_ACTION_TOKEN
from workshop.sft import SFT_RUN_FILE, SftArgs, action_loss, fine_tune, learning_rate, load_trainable
from workshop.tiny import TinySize

MEMORISING = {"steps": 250, "batch_size": 8, "lr": 6e-3, "warmup_steps": 20, "augment": False, "log_every": 50}
WIDER = replace(SMALL, llm_dim=32, llm_heads=2, llm_mlp_dim=64)
CPU = torch.device("cpu")


def _args(demos: Path, out: Path, **changes) -> SftArgs:
    options = {"size": SMALL, "holdout": 0.0, "log_every": 2, "device": "cpu", "steps": 4, "batch_size": 4}
    return SftArgs((demos,), out, **(options | {"warmup_steps": 1} | changes))


def read_records(folder: Path) -> list[dict]:
    file = folder / "sft_metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """(folder, the episodes): two episodes of four frames."""
    folder = tmp_path_factory.mktemp("demos")
    return folder, write_demos(folder)


@pytest.fixture(scope="module")
def memorised(demos, tmp_path_factory):
    """A policy trained on the two episodes until it knows them."""
    return fine_tune(_args(demos[0], tmp_path_factory.mktemp("sft") / "memorised", **MEMORISING, size=WIDER))


def _observations(episodes) -> list[Observation]:
    return [
        Observation(images, proprio.astype(np.float64), episode.instruction)
        for i, episode in enumerate(episodes)
        for images, proprio in zip(raw_images(i), episode.proprio, strict=True)
    ]


def test_the_policy_acts_as_the_demonstrations_that_it_memorised(demos, memorised):
    losses = [record["loss"] for record in read_records(memorised)]
    assert losses[0] > 3
    assert losses[-1] < 0.1
    policy = Policy.load(str(memorised), task_suite="libero_spatial")
    actions = policy.act(_observations(demos[1]), "greedy").actions
    labels = np.concatenate([[e.actions[step : step + 8] for step in e.frame_steps] for e in demos[1]])
    low, high = policy.statistics.action.q01[:6], policy.statistics.action.q99[:6]
    assert (np.abs(actions[..., :6] - np.clip(labels[..., :6], low, high)) <= (high - low) / 255 + 1e-6).all()
    np.testing.assert_array_equal(actions[..., 6], labels[..., 6])


def test_the_folder_is_a_checkpoint_like_any_other(demos, tmp_path):
    init = make_small_checkpoint(tmp_path / "init", l1_head=True)
    out = fine_tune(_args(demos[0], tmp_path / "out", init=str(init), size=TinySize(), holdout=0.5))
    assert {path.name for path in out.iterdir()} == {
        "config.json", "dataset_statistics.json", "generation_config.json", "model.safetensors",
        "preprocessor_config.json", "proprio_projector--latest_checkpoint.pt", "sft_metrics.jsonl", SFT_RUN_FILE,
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert [record["step"] for record in read_records(out)] == [2, 4]
    assert "held_out/nll" in read_records(out)[-1]
    run = json.loads((out / SFT_RUN_FILE).read_text())
    assert (run["steps"], run["train_episodes"], run["train_frames"]) == (4, 1, 4)
    info = inspect_checkpoint(out)
    assert (info.kind, info.num_images, info.uses_proprio) == ("action tokens", 2, True)  # without init's L1 head
    assert list(info.statistics) == ["libero_spatial_no_noops"]
    assert (inspect_checkpoint(init).looks, info.looks) == ((), ("lowpoly",))
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


def test_all_that_the_network_computes_is_trained_and_rows_of_other_ids_are_zero(demos, tmp_path):
    init = make_small_checkpoint(tmp_path / "init")
    out = fine_tune(_args(demos[0], tmp_path / "out", init=str(init), size=TinySize(), save_dtype="float32"))
    before, after = (load_trainable(inspect_checkpoint(folder), CPU).state_dict() for folder in (init, out))
    unchanged = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    parts = (f"blocks.{SMALL.vision_depth - 1}.", "norm.", "attn_pool.")
    never_computed = tuple(
        f"vision_backbone.{vit}.{part}" for vit in ("featurizer", "fused_featurizer") for part in parts
    )
    # DINOv2's class token is only attended to, and trained by that.
    assert unchanged == {name for name in after if name.startswith(never_computed)}
    weight = after["language_model.lm_head.weight"]
    rows = torch.ones(len(weight), dtype=torch.bool)
    rows[FIRST_ACTION_TOKEN : FIRST_ACTION_TOKEN + 256] = False
    assert not weight[rows].any()
    assert weight[~rows].any(dim=1).all()


def test_ctrl_c_saves_what_there_is(demos, tmp_path, monkeypatch, capsys):
    def interrupted(step: int, args: SftArgs) -> float:
        if step == 2:
            raise KeyboardInterrupt
        return learning_rate(step, args)

    monkeypatch.setattr(workshop.sft, "learning_rate", interrupted)
    out = fine_tune(_args(demos[0], tmp_path / "out"))
    assert "interrupted in step 3" in capsys.readouterr().out
    assert [record["step"] for record in read_records(out)] == [2]
    assert Policy.load(str(out), task_suite="libero_spatial").kind == "action tokens"


def test_a_loss_that_is_not_finite_ends_the_training(demos, tmp_path):
    with pytest.raises(BadInput, match="--lr"):
        fine_tune(_args(demos[0], tmp_path / "out", lr=1e30, warmup_steps=0))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"holdout": 1.0}, "--holdout"),
        ({"steps": 0}, "--steps"),
        ({"lr": math.nan}, "--lr"),
        ({"device": "gpu"}, "--device"),
        ({"size": replace(SMALL, vision_dim=17)}, "--size"),
        ({"init": "somewhere"}, "--size"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_is_written(demos, tmp_path, changes, flag):
    with pytest.raises(BadInput, match=flag):
        fine_tune(_args(demos[0], tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_the_loss_is_the_cross_entropy_of_openvla_oft_over_all_ids():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 56, 8, generator=generator)
    lm_head = nn.Linear(8, 32064, bias=False)
    with torch.no_grad():
        lm_head.weight.zero_()
        lm_head.weight[FIRST_ACTION_TOKEN : FIRST_ACTION_TOKEN + 256] = torch.randn(256, 8, generator=generator)
    targets = torch.randint(256, (2, 56), generator=generator)
    everything = lm_head(hidden)
    expected = F.cross_entropy(everything.flatten(0, 1), targets.flatten() + FIRST_ACTION_TOKEN)
    action_rows = everything[..., FIRST_ACTION_TOKEN : FIRST_ACTION_TOKEN + 256]
    torch.testing.assert_close(action_loss(action_rows, targets, 32064), expected)


def test_learning_rate_rises_linearly_and_falls_as_a_cosine_to_a_hundredth():
    args = _args(Path(), Path(), steps=1100, warmup_steps=100, lr=2.0)
    assert learning_rate(0, args) == pytest.approx(2.0 / 101)
    assert learning_rate(49, args) == pytest.approx(2.0 * 50 / 101)
    assert learning_rate(100, args) == pytest.approx(2.0)
    assert learning_rate(600, args) == pytest.approx(2.0 * (0.01 + 0.99 * 0.5))
    assert learning_rate(1100, args) == pytest.approx(0.02)
