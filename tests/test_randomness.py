"""Generators are a function of (seed, purpose, counters) and differ in each of them."""

import itertools

import numpy as np
import pytest
import torch

from rl.randomness import numpy_generator, torch_generator


def numpy_draw(*key) -> tuple[int, ...]:
    return tuple(numpy_generator(*key).integers(0, 2**62, size=2).tolist())


def torch_draw(*key) -> tuple[int, ...]:
    return tuple(torch.randint(2**62, (2,), generator=torch_generator(*key)).tolist())


draws = pytest.mark.parametrize("draw", [numpy_draw, torch_draw])


@draws
def test_same_key_same_numbers_whatever_was_drawn_before(draw):
    first = draw(3, "rollout", 1, 2, 3)
    np.random.default_rng().integers(10)
    torch.rand(100)
    draw(3, "rollout", 9)
    assert draw(3, "rollout", 1, 2, 3) == first


@draws
def test_every_part_of_the_key_changes_the_numbers(draw):
    keys = itertools.product((0, 1, 2**40), ("rollout", "evaluation"), (0, 1, 500), (0, 1, 500))
    drawn = [draw(seed, purpose, a, b) for seed, purpose, a, b in keys]
    assert len(set(drawn)) == len(drawn) == 54


@draws
def test_a_further_counter_changes_the_numbers_even_when_it_is_0(draw):
    assert draw(0, "rollout", 5) != draw(0, "rollout", 5, 0)


def test_the_global_generators_are_left_alone():
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    torch_draw(0, "rollout", 1)
    numpy_draw(0, "rollout", 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002


def test_neighbouring_decisions_draw_uncorrelated_numbers():
    rows = torch.stack([torch.rand(200, generator=torch_generator(0, "rollout", 0, 0, t)) for t in range(20)])
    correlations = torch.corrcoef(rows) - torch.eye(20)
    assert correlations.abs().max() < 0.35  # about five standard deviations of 1 / sqrt(200)
