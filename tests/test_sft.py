"""Fine-tuning as a whole: from files of demonstrations to a policy that acts as they do."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from configs.config import ModelConfig, PhaseConfig, TrainConfig
from contracts import BadInput, Observation, SelfCheckError
from experiment.setup import load_teacher
from rl.trajectory import Decision, Episode, Trajectory, flatten
from rl.update import Learner, micro_batch_loss
from tests.demo_episodes import raw_images, write_demos
from tests.small_checkpoint import SMALL, make_small_checkpoint
from vla.checkpoint import inspect_checkpoint
from vla.dataset_statistics import load_statistics, same_statistics
from vla.loading import LoadOptions
from vla.merge import merge
from vla.network_io import load_network
from vla.policy import Policy
from vla.tokens import FIRST_ACTION_TOKEN
from workshop.sft import SFT_RUN_FILE, fine_tune
from workshop.sft_check import check_written
from workshop.sft_config import SftArgs
from workshop.sft_data import make_observations, read_demos
from workshop.sft_update import SUPERVISED, logits_of
from workshop.tiny import TinySize
from workshop.whole_network import WholeNetwork

MEMORISING = {
    "steps": 250,
    "batch_size": 8,
    "lr": 6e-3,
    "warmup_steps": 20,
    "augment": False,
    "log_every": 50,
}
ADAPTERS = MEMORISING | {"lora_rank": 16, "size": TinySize(), "lr": 1e-2, "steps": 120, "batch_size": 4}
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


def _acts_as(policy: Policy, episodes) -> float:
    """The share of the actions that are the demonstrations' but for their bins."""
    actions = policy.act(_observations(episodes), "greedy").actions
    labels = np.concatenate([[e.actions[step : step + 8] for step in e.frame_steps] for e in episodes])
    low, high = policy.statistics.action.q01[:6], policy.statistics.action.q99[:6]
    near = np.abs(actions[..., :6] - np.clip(labels[..., :6], low, high)) <= (high - low) / 255 + 1e-6
    return np.concatenate([near, actions[..., 6:] == labels[..., 6:]], axis=-1).mean()


def test_the_policy_acts_as_the_demonstrations_that_it_memorised(demos, memorised):
    losses = [record["loss"] for record in read_records(memorised)]
    assert losses[0] > 3
    assert losses[-1] < 0.1
    assert _acts_as(Policy.load(str(memorised), LoadOptions(task_suite="libero_spatial")), demos[1]) == 1


def test_the_folder_is_a_checkpoint_like_any_other(demos, tmp_path):
    init = make_small_checkpoint(tmp_path / "init", l1_head=True)
    out = fine_tune(_args(demos[0], tmp_path / "out", init=str(init), size=TinySize(), holdout=0.5))
    assert {path.name for path in out.iterdir()} == {
        "config.json", "dataset_statistics.json", "first_frame.png", "generation_config.json", "model.safetensors",
        "preprocessor_config.json", "proprio_projector--latest_checkpoint.pt", "sft_metrics.jsonl", SFT_RUN_FILE,
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert [record["step"] for record in read_records(out)] == [2, 4]
    assert "held_out/nll" in read_records(out)[-1]
    run = json.loads((out / SFT_RUN_FILE).read_text())
    assert (run["steps"], run["train_episodes"], run["train_frames"]) == (4, 1, 4)
    info = inspect_checkpoint(out)
    assert (info.kind, info.num_images, info.uses_proprio) == (
        "action tokens",
        2,
        True,
    )  # without init's L1 head
    assert list(info.statistics) == ["libero_spatial_no_noops"]
    assert (inspect_checkpoint(init).looks, info.looks) == ((), ("lowpoly",))
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


def test_all_that_the_network_computes_is_trained_and_rows_of_other_ids_are_zero(demos, tmp_path):
    init = make_small_checkpoint(tmp_path / "init")
    out = fine_tune(_args(demos[0], tmp_path / "out", init=str(init), size=TinySize(), save_dtype="float32"))
    infos = [inspect_checkpoint(folder) for folder in (init, out)]
    before, after = (load_network(info, 56, CPU, torch.float32).state_dict() for info in infos)
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
    rate = SftArgs.learning_rate

    def interrupted(args: SftArgs, step: int) -> float:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return rate(args, step)

    monkeypatch.setattr(SftArgs, "learning_rate", interrupted)
    out = fine_tune(_args(demos[0], tmp_path / "out"))
    assert "interrupted after 2 steps" in capsys.readouterr().out
    assert [record["step"] for record in read_records(out)] == [2]
    assert Policy.load(str(out), LoadOptions(task_suite="libero_spatial")).kind == "action tokens"


def test_a_loss_that_is_not_finite_ends_the_training(demos, tmp_path):
    with pytest.raises(BadInput, match="--lr"):
        fine_tune(_args(demos[0], tmp_path / "out", lr=1e18, warmup_steps=0))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"holdout": 1.0}, "--holdout"),
        ({"steps": 0}, "--steps"),
        ({"lr": math.nan}, "--lr"),
        ({"device": "gpu"}, "--device"),
        ({"size": replace(SMALL, vision_dim=17)}, "--size"),
        ({"init": "somewhere"}, "--size"),
        ({"lora_rank": 4}, "--init"),
        ({"lora_rank": 0, "init": "somewhere", "size": TinySize()}, "--lora-rank"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_is_written(demos, tmp_path, changes, flag):
    with pytest.raises(BadInput, match=flag):
        fine_tune(_args(demos[0], tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_the_loss_is_the_cross_entropy_of_openvla_oft_over_all_ids(demos, tmp_path):
    folder, observations = make_small_checkpoint(tmp_path / "init"), _observations(demos[1])
    info = inspect_checkpoint(folder)
    policy = Policy.load(str(folder), LoadOptions(task_suite="libero_spatial"))
    whole = WholeNetwork(info, policy.unnorm_key, CPU)
    tokens = torch.randint(FIRST_ACTION_TOKEN, FIRST_ACTION_TOKEN + 256, (len(observations), 56))
    batch = flatten([Trajectory(Episode(0, 0, None, 0), [
        Decision(one, of_one, True, executed=8) for one, of_one in zip(observations, tokens, strict=True)
    ])], action_dim=7)  # fmt: skip
    for learner in (policy, whole):
        of_rows, _ = micro_batch_loss(Learner(learner, None, None), batch, SUPERVISED, TrainConfig())
        hidden = learner.network(*learner.model_inputs(observations))[1]
        logits = learner.network.vocabulary_logits(hidden)
        torch.testing.assert_close(
            of_rows / len(batch), F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        )


def test_learning_rate_rises_linearly_and_falls_as_a_cosine_to_a_hundredth():
    args = _args(Path(), Path(), steps=1100, warmup_steps=100, lr=2.0)
    assert args.learning_rate(0) == pytest.approx(2.0 / 101)
    assert args.learning_rate(49) == pytest.approx(2.0 * 50 / 101)
    assert args.learning_rate(100) == pytest.approx(2.0)
    assert args.learning_rate(600) == pytest.approx(2.0 * (0.01 + 0.99 * 0.5))
    assert args.learning_rate(1100) == pytest.approx(0.02)
    assert (
        _args(Path(), Path(), init="x", size=TinySize(), lora_rank=4, warmup_steps=0).learning_rate(0) == 5e-4
    )


# Adapters


@pytest.fixture(scope="module")
def headless(memorised, tmp_path_factory):
    """What memorised the two episodes, with a token head that knows nothing, and statistics of other data."""
    folder = shutil.copytree(memorised, tmp_path_factory.mktemp("headless") / "base")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["language_model.lm_head.weight"]
    head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(0)) / head.shape[1] ** 0.5)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    entries = json.loads((folder / "dataset_statistics.json").read_text())
    for vector in (entries["libero_spatial_no_noops"][name] for name in ("action", "proprio")):
        vector["q99"] = [2 * value + 1 for value in vector["q99"]]
    (folder / "dataset_statistics.json").write_text(json.dumps(entries))
    return folder


@pytest.fixture(scope="module")
def adapters(demos, headless, tmp_path_factory):
    """The same demonstrations, learned by adapters."""
    out = tmp_path_factory.mktemp("sft") / "adapters"
    return fine_tune(_args(demos[0], out, **ADAPTERS, init=str(headless)))


def test_adapters_teach_a_head_to_speak_action_tokens(demos, adapters):
    policy = Policy.load(str(adapters), LoadOptions(task_suite="libero_spatial"))
    assert _acts_as(policy, demos[1]) > 0.9
    logits, others = policy.logits_and_other_logsumexp(_observations(demos[1]))
    assert (
        logits.logsumexp(-1) > others + 2
    ).all()  # among all ids: an argmax over these finds action tokens, too


def test_the_demonstrations_statistics_stay_with_all_that_follows(demos, headless, adapters, tmp_path):
    own = load_statistics(adapters)["libero_spatial_no_noops"]
    base = Policy.load(str(headless), LoadOptions(task_suite="libero_spatial"))
    assert not same_statistics(own, base.statistics)
    assert not base.use_teacher_adapter(str(adapters))  # its tokens mean other actions
    policy = Policy.load(str(adapters), LoadOptions(task_suite="libero_spatial"))
    policy.save_adapter(tmp_path / "later")  # as by RL that began here
    merge(tmp_path / "later", tmp_path / "merged")
    for folder in (tmp_path / "later", tmp_path / "merged"):
        again = Policy.load(str(folder), LoadOptions(task_suite="libero_spatial"))
        assert same_statistics(again.statistics, own)
        assert _acts_as(again, demos[1]) > 0.9


def test_the_teacher_of_a_run_that_begins_at_an_adapter_is_this_adapter(demos, adapters):
    policy = Policy.load(str(adapters), LoadOptions(task_suite="libero_spatial"))
    teacher = load_teacher(policy, ModelConfig(str(adapters)), PhaseConfig(), "libero_spatial", kl_coef=0.0)
    assert (teacher.mode, policy.equals_teacher()) == ("greedy", True)
    observations = _observations(demos[1])
    before = policy.act(observations)
    for _, parameter in policy.named_trainable_parameters():
        parameter.data.add_(0.05)
    assert not policy.equals_teacher()
    assert torch.equal(policy.act_as_teacher(observations).tokens, before.tokens)


def test_a_token_head_that_was_not_saved_is_found(demos, headless, adapters, tmp_path):
    policy = Policy.load(str(adapters), LoadOptions(task_suite="libero_spatial"))
    args = _args(demos[0], shutil.copytree(adapters, tmp_path / "out"), **ADAPTERS, init=str(headless))
    read = read_demos(args, tmp_path)
    before = logits_of(policy, make_observations(read.train))
    check_written(args, read, before, CPU)
    tensors = load_file(args.out / "adapter_model.safetensors")
    without = {name: x * 0 if "lm_head" in name else x for name, x in tensors.items()}
    save_file(without, args.out / "adapter_model.safetensors")
    with pytest.raises(SelfCheckError, match="what was written is not what was trained"):
        check_written(args, read, before, CPU)
