"""Numbers are proven against the reference in test_openvla_oft.py; here are the properties that it cannot show."""

import math

import numpy as np
import pytest
import torch

from vla.heads import L1RegressionHead, ProprioProjector


def test_full_size_heads_have_the_published_parameters():
    with torch.device("meta"):
        projector, head = ProprioProjector(8, 4096), L1RegressionHead(2, 4096, 4096, 7)
    assert sum(p.numel() for p in projector.parameters()) == 16_818_176
    assert sum(p.numel() for p in head.parameters()) == 151_117_831


def test_proprio_projector_is_two_layers_around_the_exact_gelu():
    torch.manual_seed(0)
    projector = ProprioProjector(3, 5).double()
    x = np.array([[0.3, -1.0, 0.7], [2.0, 0.1, -0.4]])
    w1, b1, w2, b2 = (p.detach().numpy() for p in projector.parameters())
    hidden = x @ w1.T + b1
    hidden = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    np.testing.assert_allclose(projector(torch.from_numpy(x)).detach(), hidden @ w2.T + b2, rtol=1e-12)


@pytest.mark.parametrize(("action_dim", "chunk_length"), [(7, 8), (14, 25), (7, 5)])
def test_action_t_is_read_from_its_own_tokens_alone(action_dim, chunk_length):
    torch.manual_seed(0)
    head = L1RegressionHead(2, 6, 10, action_dim)
    hidden = torch.randn(2, chunk_length * action_dim, 6)
    before = head(hidden)
    assert before.shape == (2, chunk_length, action_dim)
    hidden[:, 2 * action_dim : 3 * action_dim] += 1.0  # the tokens of action 2
    changed = (head(hidden) != before).any(-1)
    assert changed.tolist() == [[t == 2 for t in range(chunk_length)]] * 2


@pytest.mark.parametrize(
    "module", [ProprioProjector(8, 12), L1RegressionHead(2, 12, 20, 7), L1RegressionHead(3, 5, 8, 14)]
)
def test_sizes_are_read_from_the_tensors(module):
    copy = type(module).from_state_dict(module.state_dict())
    assert copy.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(copy.parameters(), module.parameters(), strict=True))
    assert not copy.training
