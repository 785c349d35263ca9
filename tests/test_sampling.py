import numpy as np
import pytest
import torch

from vla.tokens import FIRST_ACTION_TOKEN, sample_tokens, token_logprobs


@pytest.fixture(scope="module")
def logits():
    return torch.randn(6, 56, 256, generator=torch.Generator().manual_seed(0)) * 2


def _generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_draw_does_not_depend_on_the_batch_around_it(logits):
    together = sample_tokens(logits, 1.3, _generators(*range(6)))
    alone = torch.cat([sample_tokens(logits[i : i + 1], 1.3, _generators(i)) for i in range(6)])
    assert torch.equal(together, alone)
    reordered = sample_tokens(logits[[4, 1]], 1.3, _generators(4, 1))
    assert torch.equal(reordered, together[[4, 1]])


def test_another_generator_gives_other_tokens(logits):
    first, second = (sample_tokens(logits[:1], 1.0, _generators(seed)) for seed in (1, 2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_frequencies_are_the_softmax_at_the_temperature(temperature):
    """100,000 draws of 4 outcomes: the standard error of a frequency is below 0.0016."""
    raw = torch.tensor([0.0, 1.0, 2.0, -1.0])
    logits = torch.full((1, 1, 256), -1e4)
    logits[0, 0, [0, 3, 100, 255]] = raw
    tokens = sample_tokens(logits.expand(1, 100_000, 256), temperature, _generators(0)) - FIRST_ACTION_TOKEN
    frequencies = torch.bincount(tokens[0], minlength=256)[[0, 3, 100, 255]] / 100_000
    np.testing.assert_allclose(frequencies, (raw / temperature).softmax(0), atol=0.007)


def test_certain_outcomes_at_both_ends_are_drawn():
    for column in (0, 255):
        logits = torch.full((1, 1000, 256), -1e4)
        logits[..., column] = 0
        assert (sample_tokens(logits, 1.0, _generators(0)) == FIRST_ACTION_TOKEN + column).all()


def test_low_temperature_is_greedy(logits):
    tokens = sample_tokens(logits, 1e-4, _generators(*range(6)))
    assert torch.equal(tokens, logits.argmax(-1) + FIRST_ACTION_TOKEN)


def test_probabilities_of_all_tokens_sum_to_one(logits):
    every_token = torch.arange(256).add(FIRST_ACTION_TOKEN).expand(6, 56, 256)
    logprobs = torch.stack([token_logprobs(logits, every_token[..., v], 1.6) for v in range(256)], dim=-1)
    np.testing.assert_allclose(logprobs.exp().sum(-1), 1.0, rtol=1e-5)
