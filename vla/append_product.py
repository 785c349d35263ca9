"""[x ; A x] written once: in a compiled pass, whatever computes x writes it beside the columns that A x will take.

A `torch.cat` of x and A x copies x, because x must be there before A x can be computed: one more copy of every layer's
input. For a `cat` of x and zeros torch.compile copies nothing that it computes itself (it does what attention
returns), and one operation in place then puts A x where the zeros are. For an assignment to a slice it would copy all.
What it gains: docs/RESULTS.md, "Batches".
"""

import torch
from torch import Tensor


def with_product_appended(x: Tensor, downs: Tensor) -> Tensor:
    """(..., K) and (R, K) -> (..., K + R): x, and behind it x times the transposed `downs`. Has no gradient."""
    wide = torch.cat([x, x.new_zeros(*x.shape[:-1], len(downs))], dim=-1)
    torch.ops.vla_grpo.append_product(wide, downs)
    return wide


# By the tag it may get rows that are padded in memory. (`torch.library.custom_op` takes tags from torch 2.7 on.)
torch.library.define(
    "vla_grpo::append_product", "(Tensor(a!) wide, Tensor downs) -> ()", tags=(torch.Tag.needs_fixed_stride_order,)
)


@torch.library.impl("vla_grpo::append_product", "CompositeExplicitAutograd")
def append_product(wide: Tensor, downs: Tensor) -> None:
    """The last R columns of `wide` (..., K + R) become the product of its first K and `downs` (R, K), transposed."""
    rows, split = wide.view(-1, wide.shape[-1]), downs.shape[1]
    torch.mm(rows[:, :split], downs.T, out=rows[:, split:])


@torch.library.register_fake("vla_grpo::append_product")
def _without_result(wide: Tensor, downs: Tensor) -> None:
    pass
