"""The policy in checkpoints/tiny-libero-spatial is what its README says, and room is left to improve it."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from tests.small_checkpoint import BUNDLED, load_policy
from vla.policy import Policy
from workshop.moved_objects import reset_with_moved_objects

MAX_BYTES = 20_000_000  # everyone who clones the repository downloads it


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(BUNDLED)


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoEnv]:
    env = LiberoEnv(EnvSpec("libero_spatial", (0,), num_images=1, assets="lowpoly"), 0)
    yield env
    env.close()


def test_the_files_are_those_of_the_card_and_small():
    card = (BUNDLED / "README.md").read_text()
    rows = re.findall(r"^\| (\S+) \| ([\d,]+) \| `([0-9a-f]{64})` \|$", card, re.MULTILINE)
    paths = [path for path in BUNDLED.iterdir() if path.name != "README.md"]
    contents = {path.name: path.read_bytes() for path in paths}
    assert {name: (int(size.replace(",", "")), digest) for name, size, digest in rows} == {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
    }
    assert sum(len(content) for content in contents.values()) + len(card) <= MAX_BYTES


def test_its_decision_changes_with_what_it_sees(policy, env):
    """Its distributions are wide, so moved objects change them less than a black image does; a blind policy: 0.002."""
    first = env.reset(Start(0)).observation
    moved = reset_with_moved_objects(env, Start(0), 0.08, np.random.default_rng(1)).observation
    black = np.zeros_like(first.images)
    views = [first, replace(first, images=moved.images), replace(first, images=black)]
    with torch.no_grad():
        before, *after = policy.chunk_logits(views).log_softmax(-1)
    changes = [(before.exp() * (before - other)).sum(-1).mean().item() for other in after]
    assert changes[0] > 0.05
    assert changes[1] > 0.5


def test_it_solves_initial_states_that_no_demonstration_began_in(policy, env):
    """Greedy, three of those that its card counts; on another processor rounding may decide one of them."""
    successes = 0
    for init_state in (10, 31, 46):
        result = env.reset(Start(init_state))
        while not result.done:
            result = env.step_chunk(policy.act([result.observation]).actions[0])
        successes += result.success
    assert successes >= 2
