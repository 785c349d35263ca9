"""[x ; A x], and the operation in place that writes A x."""

import pytest
import torch

from vla.append_product import with_product_appended

X, DOWNS = torch.randn(2, 5, 7), torch.randn(3, 7)


def test_the_product_stands_behind_the_input():
    before = X.clone()
    wide = with_product_appended(X, DOWNS)
    torch.testing.assert_close(wide, torch.cat([X, X @ DOWNS.T], dim=-1))
    assert torch.equal(X, before)


@pytest.mark.parametrize("padding", [0, 6])
def test_the_operation_keeps_the_rules_of_torchs_compiler(padding):
    wide = torch.randn(2, 5, 10 + padding)[..., :10]  # torch.compile pads rows of an awkward length
    torch.library.opcheck(torch.ops.vla_grpo.append_product, (wide, DOWNS))
    expected = wide[..., :7] @ DOWNS.T
    torch.ops.vla_grpo.append_product(wide, DOWNS)
    torch.testing.assert_close(wide[..., 7:], expected)
