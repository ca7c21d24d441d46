"""Dense products of a decode step on a card, against float64."""

import pytest
import torch

from packhorse.kernels.cuda.launch import has_type
from packhorse.kernels.linear.dense import dense_linear

pytestmark = pytest.mark.gpu

TYPES = [torch.float16, torch.bfloat16, torch.float32]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("num_cols", [8, 248, 264, 2048, 2056, 5120])
@pytest.mark.parametrize("weight_type", TYPES)
def test_products(weight_type, num_cols):
    """Rows that fill no block, columns around what is sent for ahead, 1 to 16 tokens: their bits are alone the same."""
    x_type = torch.bfloat16 if has_type(torch.device("cuda"), torch.bfloat16) else torch.float16
    for types, num_tokens in ((x_type, 16), (torch.float32, 3)):
        num_rows = 37
        weight = randn(num_rows, num_cols, seed=1).to(weight_type)
        x = randn(num_tokens, num_cols, seed=2).to(types)
        bias, residual = randn(num_rows, seed=3), randn(num_tokens, num_rows, seed=4)
        want = x.double() @ weight.double().T + bias.double()
        # A lane adds up every 32nd eight of columns, in fp32: half a unit in the last place each, at most.
        sizes = x.double().abs() @ weight.double().abs().T + bias.double().abs() + residual.double().abs()
        bound = 2**-24 * (num_cols / 32 + 10) * sizes
        for sigmoid in (False, True):
            out = torch.full((num_tokens, num_rows), torch.nan, device="cuda")
            got = dense_linear(x, weight, bias, residual=residual, sigmoid=sigmoid, out=out)
            assert got is out
            asked = (want.sigmoid() if sigmoid else want) + residual.double()
            assert bool(((got.double() - asked).abs() <= bound + 1e-6 * sigmoid).all())
        alone = torch.cat([dense_linear(x[m : m + 1], weight, bias) for m in range(num_tokens)])
        assert torch.equal(alone, dense_linear(x, weight, bias))


def test_a_chain_of_products_is_in_order():
    """Each starts before the one before it has ended, and reads what that one writes."""
    weight, x = randn(512, 512, seed=5) / 512**0.5, randn(4, 512, seed=6)
    outs = [torch.full((4, 512), torch.nan, device="cuda") for _ in range(50)]
    first = dense_linear(x, weight, out=outs[0])
    for out in outs[1:]:
        first = dense_linear(first, weight, out=out)
    again = x
    for out in outs:
        again = dense_linear(again, weight)
        torch.cuda.synchronize()
        assert torch.equal(out, again)
