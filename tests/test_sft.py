"""Fine-tuning as a whole: from files of demonstrations to a policy that acts as they do."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from command_line import parse_flags
from contracts import BadInput, read_json, write_json
from tests.demo_episodes import observations_of, write_demos
from tests.small_checkpoint import BUNDLED, SMALL, load_policy, load_small_network, make_small_checkpoint
from vla.checkpoint import inspect_checkpoint
from vla.dataset_statistics import STATISTICS_FILE, load_statistics, scale_digest
from vla.load_options import Mode
from vla.merge import merge
from vla.policy import Policy
from vla.tokens import ACTION_TOKEN_IDS
from workshop import sft_training
from workshop.demo_files import DemoEpisode, list_episodes, read_episode
from workshop.sft_config import SftArgs, TinySize
from workshop.sft_training import fine_tune, logits_and_other_logsumexp, token_loss
from workshop.tiny import make_tiny_checkpoint
from workshop.whole_network import WholeNetwork

SHORT = {
    "steps": 4,
    "batch_size": 4,
    "warmup_steps": 1,
    "size": SMALL,
    "holdout": 0.0,
    "log_every": 2,
    "device": "cpu",
}
MEMORISING = {"steps": 150, "batch_size": 8, "lr": 1e-2, "warmup_steps": 20, "augment": False}
FROM_CHECKPOINT = {"size": TinySize()}  # the sizes are the checkpoint's own
ADAPTERS = MEMORISING | FROM_CHECKPOINT | {"lora_rank": 8, "steps": 120, "batch_size": 2}
KEY = "libero_spatial_no_noops"
WIDER = replace(SMALL, llm_dim=32, llm_heads=2, llm_mlp_dim=64)


def sft_args(demos: Path, out: Path, **changes) -> SftArgs:
    return SftArgs((str(demos),), out, **(SHORT | changes))


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Path:
    """Two episodes of four frames."""
    folder = tmp_path_factory.mktemp("demos")
    write_demos(folder)
    return folder


@pytest.fixture(scope="module")
def episodes(demos) -> list[DemoEpisode]:
    return [read_episode(path) for path in list_episodes(demos)]


@pytest.fixture(scope="module")
def memorised(demos, tmp_path_factory) -> Path:
    """A policy trained on the two episodes until it knows them."""
    out = tmp_path_factory.mktemp("sft") / "memorised"
    return fine_tune(sft_args(demos, out, **MEMORISING | {"size": WIDER}))


def share_as_demonstrated(
    policy: Policy, episodes: list[DemoEpisode], mode: Mode = "greedy", bins: int = 1
) -> float:
    """The share of the policy's actions that equal the demonstrated ones, up to the width of so many bins."""
    actions = policy.act(observations_of(episodes), mode).actions
    demonstrated = np.concatenate([episode.chunks() for episode in episodes])
    low = policy.statistics.action.q01[:6]
    high = policy.statistics.action.q99[:6]
    errors = np.abs(actions[..., :6] - np.clip(demonstrated[..., :6], low, high))
    motions_are_equal = errors <= bins * (high - low) / 255 + 1e-6
    grippers_are_equal = actions[..., 6:] == demonstrated[..., 6:]
    return np.concatenate([motions_are_equal, grippers_are_equal], axis=-1).mean()


def test_the_policy_acts_as_the_demonstrations_that_it_memorised(episodes, memorised):
    assert share_as_demonstrated(load_policy(memorised), episodes) == 1


@pytest.fixture(scope="module")
def init(tmp_path_factory) -> Path:
    """A checkpoint whose L1 head is not to be trained."""
    return make_small_checkpoint(tmp_path_factory.mktemp("init"), dtype=torch.bfloat16, l1_head=True)


@pytest.fixture(scope="module")
def continued(demos, init, tmp_path_factory) -> Path:
    """`init`, trained a little."""
    out = tmp_path_factory.mktemp("sft") / "continued"
    return fine_tune(sft_args(demos, out, init=str(init), holdout=0.5, lr=1e-2, **FROM_CHECKPOINT))


def test_the_folder_is_a_checkpoint_of_bfloat16_that_says_what_it_reads(continued):
    records = [json.loads(line) for line in (continued / "sft_metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4]
    assert "held_out/loss" in records[-1]
    info = inspect_checkpoint(continued)
    assert info.kind == "action tokens"  # init's L1 head is left out
    assert (info.num_images, info.uses_proprio) == (2, True)
    assert list(info.statistics) == [KEY]
    assert info.looks == ("lowpoly",)
    tensors = load_file(continued / "model.safetensors").values()
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}


def test_an_adapter_has_to_be_merged_before_it_is_a_start(demos, init, tmp_path):
    load_policy(init).save_adapter(tmp_path / "adapter")
    with pytest.raises(BadInput, match="merge it first"):
        fine_tune(sft_args(demos, tmp_path / "out", init=str(tmp_path / "adapter"), **FROM_CHECKPOINT))


def test_all_that_the_network_computes_is_trained_and_rows_of_other_ids_are_zero(init, continued):
    before = load_small_network(init).state_dict()
    after = load_small_network(continued).state_dict()
    unchanged = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    # DINOv2's class token is only attended to, and trained by that.
    never_computed = tuple(
        f"vision_backbone.{vit}.{part}"
        for vit in ("featurizer", "fused_featurizer")
        for part in (f"blocks.{SMALL.vision_depth - 1}.", "norm.", "attn_pool.")
    )
    assert unchanged == {name for name in after if name.startswith(never_computed)}
    rows_in_use = after["language_model.lm_head.weight"].any(dim=1).nonzero().flatten()
    assert rows_in_use.tolist() == [*ACTION_TOKEN_IDS]


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"lr": 1e18, "warmup_steps": 0}, "--lr"),
        ({"l1": True, "init": str(BUNDLED), **FROM_CHECKPOINT}, "--l1"),  # it has no L1 head
    ],
)
def test_a_training_that_fails_leaves_nothing(demos, tmp_path, changes, flag):
    with pytest.raises(BadInput, match=flag):
        fine_tune(sft_args(demos, tmp_path / "out", **changes))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["load_student", "add_gradient", "measure"])
def test_too_little_gpu_memory_is_answered_with_flags_of_this_program(demos, tmp_path, monkeypatch, place):
    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sft_training, place, run_out)
    with pytest.raises(BadInput, match=r"out of GPU memory.*--lora-rank 32") as refusal:
        fine_tune(sft_args(demos, tmp_path / "out", holdout=0.5))
    assert "--num-envs" not in str(refusal.value)


def test_help_explains_each_setting_once(capsys):
    with pytest.raises(SystemExit):
        parse_flags(SftArgs, ["--help"], prog="python -m workshop.sft")
    assert capsys.readouterr().out.count("GiB of GPU memory") == 1


def test_the_loss_is_the_cross_entropy_of_openvla_oft_over_all_ids(episodes, tmp_path):
    folder = make_small_checkpoint(tmp_path / "init")
    observations = observations_of(episodes)
    tokens = torch.randint(ACTION_TOKEN_IDS.start, ACTION_TOKEN_IDS.stop, (len(observations), 56))
    policy = load_policy(folder)
    whole_network = WholeNetwork(inspect_checkpoint(folder), policy.unnorm_key, torch.device("cpu"))
    for trained in (policy, whole_network):
        loss, accuracy = token_loss(trained, observations, tokens)
        hidden = trained.network(*trained.model_inputs(observations))[1]
        logits = trained.network.language_model.lm_head(hidden).float()
        expected = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        torch.testing.assert_close(loss, expected)
        assert accuracy < 0.1  # the tokens are random


def test_an_l1_head_learns_the_demonstrations_beside_the_token_head_as_it_was_built(
    demos, episodes, tmp_path
):
    changes = MEMORISING | {"size": WIDER, "l1": True, "lr": 6e-3}
    out = fine_tune(sft_args(demos, tmp_path / "out", **changes))
    policy = load_policy(out)
    assert share_as_demonstrated(policy, episodes, "l1", bins=13) > 0.9  # 13 bins are a tenth of the range
    assert share_as_demonstrated(policy, episodes, "greedy", bins=13) < 0.5
    init = make_tiny_checkpoint(tmp_path / "init", torch.bfloat16, size=WIDER, l1_head=True)
    before = load_small_network(init).language_model
    after = load_small_network(out).language_model
    assert torch.equal(after.lm_head.weight, before.lm_head.weight)
    assert not torch.equal(after.model.embed_tokens.weight, before.model.embed_tokens.weight)


def test_adapters_teach_a_head_to_speak_action_tokens_and_keep_the_demonstrations_statistics(
    episodes, memorised, tmp_path
):
    """They learn the first episode, and begin with a random token head and statistics of other data."""
    episodes = episodes[:1]
    write_demos(tmp_path / "demos", episodes=1)
    base = shutil.copytree(memorised, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    head = tensors["language_model.lm_head.weight"]
    head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(0)) / head.shape[1] ** 0.5)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    entries = read_json(base / STATISTICS_FILE)
    for vector in (entries[KEY]["action"], entries[KEY]["proprio"]):
        vector["q99"] = [2 * value + 1 for value in vector["q99"]]
    write_json(base / STATISTICS_FILE, entries)

    adapters = fine_tune(sft_args(tmp_path / "demos", tmp_path / "adapters", init=str(base), **ADAPTERS))
    policy = load_policy(adapters)
    assert share_as_demonstrated(policy, episodes) > 0.9
    # An argmax over all ids finds action tokens, too.
    logits, other_logsumexp = logits_and_other_logsumexp(policy, observations_of(episodes))
    assert (logits.logsumexp(-1) > other_logsumexp + 2).all()

    policy.save_adapter(tmp_path / "later")  # as by RL that began here
    merge(tmp_path / "later", tmp_path / "merged")
    digest = scale_digest(load_statistics(adapters)[KEY])
    assert digest != scale_digest(load_policy(base).statistics)
    for folder in (tmp_path / "later", tmp_path / "merged"):
        assert scale_digest(load_policy(folder).statistics) == digest
        assert share_as_demonstrated(load_policy(folder), episodes) > 0.9
