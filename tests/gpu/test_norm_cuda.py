"""The norm of the residual stream on a card, against float64."""

import pytest
import torch

from packhorse.core.errors import UnsupportedCardError
from packhorse.kernels.cuda.launch import target_of
from packhorse.kernels.norm.cuda import residual_norm, variant

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (3, 2048), (16, 5120), (5, 1028), (2, 8192)])
def test_residual_norm(rows, hidden, dtype):
    """With and without something to add, which stays in the residual: one rounding of the output's type."""
    target = target_of(torch.device("cuda"))
    if target.arch < variant(dtype).min_arch:
        with pytest.raises(UnsupportedCardError):
            target.check(variant(dtype))
        pytest.skip("bf16 needs compute capability 8.0")
    generator = torch.Generator().manual_seed(hidden)
    x, add = (3 * torch.randn(2, rows, hidden, generator=generator)).cuda()
    weight = (1 + 0.1 * torch.randn(hidden, generator=generator)).cuda()
    out = torch.full((rows, hidden), torch.nan, dtype=dtype, device="cuda")
    for added in (None, add):
        total = x if added is None else x + added
        want = (
            total.double() * (total.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        )
        residual = x.clone()
        residual_norm(residual, weight, 1e-6, out, added)
        assert torch.equal(residual, total)
        bound = torch.finfo(dtype).eps / 2 * 1.01
        assert bool(((out.double() - want).abs() <= bound * want.abs() + 1e-6).all())
