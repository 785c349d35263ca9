"""A training step: what it changes, what it leaves alone, and what it repeats."""

import math
from dataclasses import replace

import pytest
import torch

from errors import BadInput
from tests.demo_episodes import write_demos
from tests.small_checkpoint import SMALL, make_small_checkpoint
from vla.checkpoint import inspect_checkpoint
from vla.preprocessing import ImageProcessor
from vla.prompt import load_tokenizer
from vla.settings import LearnerSettings
from vla.sft_checkpoint import load_trainable
from vla.sft_data import PixelScale, make_data, read_episodes
from vla.sft_learner import Learner, learning_rate
from vla.tokens import FIRST_ACTION_TOKEN, load_statistics

CPU = torch.device("cpu")
SETTINGS = LearnerSettings(steps=20, batch_size=4, warmup_steps=2, aux_weight=0.5)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(checkpoint, data, pixel scale)"""
    root = tmp_path_factory.mktemp("learner")
    write_demos(root / "demos")
    folder = make_small_checkpoint(root / "checkpoint")
    episodes = read_episodes([root / "demos"], 2, SMALL.image_size, workers=1)
    statistics = load_statistics(folder)["libero_spatial_no_noops"]
    data = make_data(episodes, [], statistics, load_tokenizer(folder), CPU, augment=True)
    return inspect_checkpoint(folder), data, PixelScale.of(ImageProcessor.load(folder), CPU)


def _trained(parts, settings: LearnerSettings, steps: int = 3) -> Learner:
    info, data, scale = parts
    learner = Learner(load_trainable(info, CPU), data, scale, settings)
    for step in range(steps):
        learner.step(step)
    return learner


def test_only_what_the_network_computes_is_changed(parts):
    before = load_trainable(parts[0], CPU).state_dict()
    after = _trained(parts, SETTINGS).network.state_dict()
    unchanged = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    last = SMALL.vision_depth - 1
    never_computed = {
        name
        for name in after
        if name.startswith(tuple(f"vision_backbone.{vit}.{part}" for vit in ("featurizer", "fused_featurizer")
                                 for part in (f"blocks.{last}.", "norm.", "attn_pool.")))
    }  # fmt: skip
    # DINOv2's class token is only attended to, and trained by that.
    assert unchanged == never_computed


def test_rows_of_other_ids_are_zero_and_stay_it(parts):
    weight = _trained(parts, SETTINGS).network.language_model.lm_head.weight
    rows = torch.ones(len(weight), dtype=torch.bool)
    rows[FIRST_ACTION_TOKEN : FIRST_ACTION_TOKEN + 256] = False
    assert not weight[rows].any()
    assert weight[~rows].any(dim=1).all()


def test_a_seed_repeats_every_weight_and_another_gives_others(parts):
    first, second, other = (_trained(parts, replace(SETTINGS, seed=seed)).network.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    name = "projector.fc1.weight"
    assert not torch.equal(first[name], other[name])


def test_metrics_are_means_since_the_last_call(parts):
    learner = _trained(parts, SETTINGS, steps=1)
    one = learner.take_metrics()
    learner.step(1)
    two = learner.take_metrics()
    again = _trained(parts, SETTINGS, steps=2).take_metrics()
    assert again["loss"] == pytest.approx((one["loss"] + two["loss"]) / 2, rel=1e-5)
    assert again["grad_norm"] > 0
    assert again["objects_loss"] > 0


def test_the_object_head_teaches_the_network_and_is_no_part_of_it(parts):
    info, data, scale = parts
    settings = replace(SETTINGS, steps=60, batch_size=8, lr=5e-3, aux_weight=10.0, augment=False, proprio_noise=0.0)
    learner = Learner(load_trainable(info, CPU), data, scale, settings)
    losses = []
    for step in range(60):
        learner.step(step)
        losses.append(learner.take_metrics()["objects_loss"])
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert learner.network.state_dict().keys() == load_trainable(info, CPU).state_dict().keys()


def test_an_object_head_needs_the_proprio_token(tmp_path, parts):
    info = inspect_checkpoint(make_small_checkpoint(tmp_path / "blind", proprio=False))
    with pytest.raises(BadInput, match="--aux-weight"):
        Learner(load_trainable(info, CPU), *parts[1:], SETTINGS)


def test_learning_rate_rises_linearly_and_falls_as_a_cosine_to_a_hundredth():
    settings = LearnerSettings(steps=1100, warmup_steps=100, lr=2.0)
    assert learning_rate(0, settings) == pytest.approx(2.0 / 101)
    assert learning_rate(49, settings) == pytest.approx(2.0 * 50 / 101)
    assert learning_rate(100, settings) == pytest.approx(2.0)
    assert learning_rate(600, settings) == pytest.approx(2.0 * (0.01 + 0.99 * 0.5))
    assert learning_rate(1100, settings) == pytest.approx(0.02)
    rates = [learning_rate(step, settings) for step in range(100, 1100)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 0), ("batch_size", 0), ("warmup_steps", -1), ("lr", 0.0), ("lr", math.nan), ("max_grad_norm", -1.0),
     ("soft_target_bins", -1.0), ("aux_weight", math.inf), ("proprio_noise", -0.1), ("weight_decay", -1.0)],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(name, value):
    with pytest.raises(BadInput, match="--" + name.replace("_", "-")):
        replace(SETTINGS, **{name: value}).check()
