"""Tokens drawn around the L1 head's actions: the student starts as that head, and ends as an L1 checkpoint."""

import shutil

import numpy as np
import pytest
import torch

from configs.config import TrainConfig, changed
from contracts import BadInput
from rl.phases import Phase, phase_at
from rl.teacher_choice import choose_teacher, settle_warmup
from tests.small_checkpoint import load_policy, trained_policy
from vla.checkpoint import inspect_checkpoint
from vla.merge import merge
from vla.tokens import (
    BIN_CENTRES,
    FIRST_ACTION_TOKEN,
    LAPLACE_SCALE,
    decode,
    encode,
    laplace_logits,
    median_tokens,
    token_logprobs,
)

HALF_A_BIN = 1 / 255
trunks = pytest.mark.parametrize("trained_blocks", [None, 2])


def laplace_policy(folder, **options):
    return load_policy(folder, l1_student="laplace", **options)


@pytest.fixture(scope="module")
def l1_folder(small, tmp_path_factory):
    """With a head whose actions lie inside [-1, 1], as a trained one's do."""
    folder = shutil.copytree(small, tmp_path_factory.mktemp("l1") / "checkpoint")
    path = next(folder.glob("action_head*"))
    head = torch.load(path, weights_only=True)
    last = next(key for key in head if key.endswith("fc2.weight"))
    head[last] *= 0.3
    torch.save(head, path)
    return folder


# The distribution


def test_its_logits_are_the_distances_from_the_bins_centres():
    value = torch.tensor([[0.3]])
    logits = laplace_logits(value)[0, 0, 1:].double()  # column 0 holds 1.0 alone
    expected = -np.abs(BIN_CENTRES[::-1] - 0.3) / LAPLACE_SCALE
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_its_greedy_token_is_the_nearest_and_inside_the_range_the_median_too():
    values = torch.linspace(-1.2, 1.2, 1001)[None]
    logits = laplace_logits(values)
    greedy = logits.argmax(-1) + FIRST_ACTION_TOKEN
    np.testing.assert_array_equal(decode(greedy), decode(encode(values.numpy())))
    inside = values.abs() < 1 - 8 * LAPLACE_SCALE
    difference = np.abs(decode(median_tokens(logits)) - decode(greedy))[inside]
    assert difference.max() <= 2 * HALF_A_BIN + 1e-9


# The student at the start


@trunks
def test_at_the_start_it_equals_its_teacher_and_the_l1_head(l1_folder, observations, trained_blocks):
    policy = laplace_policy(l1_folder, trained_blocks=trained_blocks)
    by_head = load_policy(l1_folder).act(observations, "l1")
    assert policy.equals_teacher()
    np.testing.assert_array_equal(policy.act_as_teacher(observations).tokens, by_head.tokens)
    np.testing.assert_array_equal(policy.act(observations, "l1").actions, by_head.actions)
    greedy = policy.act(observations, "greedy").tokens
    np.testing.assert_array_equal(greedy, by_head.tokens)
    hidden = policy.chunk_outputs(observations)[1]
    actions = policy.l1_head(hidden).detach().flatten(1).clamp(-1, 1).numpy()
    assert np.abs(decode(greedy) - actions).max() <= HALF_A_BIN + 1e-6


@pytest.mark.parametrize("warmup_steps", ["auto", 512])
def test_its_teacher_is_greedy_and_there_is_no_warmup(warmup_steps):
    config = changed(TrainConfig(), warmup_steps=warmup_steps)
    teacher = choose_teacher(config.phases, "a/checkpoint", 0.1, can_act_by_l1=True, is_laplace=True)
    assert teacher.mode == "greedy"
    assert phase_at(0, settle_warmup(config, teacher.mode, is_laplace=True).phases).phase is Phase.RL


# Training it


def test_the_gradient_goes_through_the_frozen_head_to_the_adapters(l1_folder, observations):
    policy = laplace_policy(l1_folder)
    tokens = policy.act(observations).tokens
    target = tokens - 8  # actions that are larger by 8 bins
    before = policy.chunk_outputs(observations)
    head_before = [p.clone() for p in policy.l1_head.parameters()]
    optimizer = policy.make_optimizer(lr=1e-3, weight_decay=0.0)
    for _ in range(20):
        logprobs = token_logprobs(policy.chunk_logits(observations), target, 1.0)
        optimizer.zero_grad()
        logprobs.mean().neg().backward()
        optimizer.step()
    mean_move = (tokens - policy.act(observations).tokens).float().mean()
    assert mean_move > 2
    assert all(map(torch.equal, policy.l1_head.parameters(), head_before))
    with policy.teacher():
        torch.testing.assert_close(policy.chunk_outputs(observations)[0], before[0])


def test_merged_it_is_an_l1_checkpoint_with_the_bases_head(l1_folder, tmp_path):
    policy = trained_policy(l1_folder, l1_student="laplace")
    policy.save_adapter(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    before = inspect_checkpoint(l1_folder)
    after = inspect_checkpoint(tmp_path / "merged")
    assert after.action_head_file.read_bytes() == before.action_head_file.read_bytes()
    assert after.kind == "L1 regression"


def test_an_l1_head_that_is_not_finite_moves_no_robot(l1_folder, observations):
    policy = load_policy(l1_folder)
    with torch.no_grad():
        policy.l1_head.model.fc2.bias[0] = torch.nan
    with pytest.raises(BadInput, match="not finite"):
        policy.act(observations, "l1")


def test_without_an_l1_head_tokens_are_those_of_the_token_head(small_one_image):
    assert not laplace_policy(small_one_image).is_laplace
