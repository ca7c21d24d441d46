"""Packed matrices times 1 to 16 tokens on a card, against float64 over the same packed values."""

import pytest
import torch

from matrix_cases import bound, error, random_packed, to_device
from packhorse.core.errors import UnsupportedCardError
from packhorse.core.formats import PACKED
from packhorse.kernels.cuda import launch
from packhorse.kernels.linear.cuda import packed_linear, packed_swiglu

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    if request.param == torch.bfloat16 and not launch.target_of(0).has_bf16:
        pytest.skip("no bf16 on this card")
    return request.param


def tokens(num, cols, dtype, seed=0):
    return torch.randn(num, cols, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.mark.parametrize("name", sorted(PACKED))
def test_every_format(name, dtype):
    """16 tokens within the bound; 1 to 15 of them, and other neighbours: the same bits."""
    form = PACKED[name]
    rows, cols = 72, 256 * 9 if form.kind in ("k", "q6_k") else 64 * 41
    weight = random_packed(name, rows, cols)
    x = tokens(16, cols, dtype)
    packed = to_device(weight)
    got = packed_linear(x, packed, out_dtype=torch.float32)
    want = x.double() @ weight.dequantize().to("cuda").double().t()
    assert error(got, want) <= bound(form, dtype)
    for num in range(1, 16):
        assert torch.equal(packed_linear(x[:num], packed, out_dtype=torch.float32), got[:num]), num
    x[1:] = tokens(15, cols, dtype, seed=1) * 100
    assert torch.equal(packed_linear(x, packed, out_dtype=torch.float32)[0], got[0])


SIZES = [
    (16, 64),
    (1, 128),
    (40, 192),
    (33, 512),
    (100, 576),
    (17, 1088),
    (48, 4096),
    (64, 5120),
    (16, 17408),
    (48, 70),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["int4-g128", "int4-g32", "int8-g16", "fp8-g128", "int5z-g64"])
def test_sizes(name, size, dtype):
    """Last units, column blocks and row blocks that are not whole; nothing beside the output is written."""
    rows, cols = size
    if cols % 64 and name == "int5z-g64":
        pytest.skip("padding cannot mean 0 there")
    weight = random_packed(name, rows, cols)
    want = tokens(11, cols, dtype).double() @ weight.dequantize().to("cuda").double().t()
    for num in (1, 8, 9, 11):
        room = torch.full((num + 1, rows + 3), torch.nan, device="cuda")
        packed_linear(tokens(11, cols, dtype)[:num], to_device(weight), out=room[:num, :rows])
        assert error(room[:num, :rows], want[:num]) <= bound(weight.format, dtype)
        assert room[num].isnan().all() and room[:, rows:].isnan().all()


@pytest.mark.parametrize("num", [1, 5, 16])
def test_bias_residual_and_rounding(num, dtype):
    weight = random_packed("int4-g128", 80, 1024)
    packed, x = to_device(weight), tokens(num, 1024, dtype)
    bias, residual = tokens(1, 80, torch.float32)[0], tokens(num, 80, torch.float32, seed=3)
    want = x.double() @ weight.dequantize().to("cuda").double().t()
    assert error(packed_linear(x, packed, bias, out_dtype=torch.float32), want + bias) <= 1e-5
    got = packed_linear(x, packed, residual=residual)
    assert error(got, want + residual) <= 1e-5
    packed_linear(x, packed, residual=residual, out=residual)
    assert torch.equal(residual, got)
    half = packed_linear(x, packed)
    assert torch.equal(half, packed_linear(x, packed, out_dtype=torch.float32).to(dtype))


@pytest.mark.parametrize("name", ["int4-g128", "q4_k", "int8-g32", "int6m-g64"])
def test_swiglu(name, dtype):
    weight = random_packed(name, 2 * 80, 1280)
    packed, x = to_device(weight), tokens(16, 1280, dtype)
    gate, up = (x.double() @ weight.dequantize().to("cuda").double().t()).chunk(2, dim=1)
    want = gate / (1 + (-gate).exp()) * up
    got = packed_swiglu(x, packed)
    assert error(got, want) <= 2 * bound(weight.format, dtype) + torch.finfo(dtype).eps
    for num in (1, 3, 8, 9):
        assert torch.equal(packed_swiglu(x[:num], packed), got[:num])
    quarter = packed_swiglu(x, packed, factor=0.25)
    assert error(quarter * 4, got) <= torch.finfo(dtype).eps


def test_what_fp16_cannot_hold_is_counted():
    weight = random_packed("int4-g128", 32, 512)
    x = tokens(2, 512, torch.float16) * 2000
    x[1] *= 0.001
    counter = launch.saturated(x.device)
    before = int(counter)
    exact = packed_linear(x, to_device(weight), out_dtype=torch.float32) * 1
    assert int(counter) == before
    large = weight.data.clone()
    large.view(32 // 16, -1)[:, :128].view(torch.float16).mul_(100)
    bigger = to_device(type(weight)(weight.format, large, 32, 512))
    got = packed_linear(x, bigger)
    beyond = packed_linear(x, bigger, out_dtype=torch.float32).abs() > 65504
    assert 0 < int(beyond.sum()) == int(counter) - before
    assert (got.abs()[beyond] == 65504).all() and torch.isfinite(got).all() and torch.isfinite(exact).all()


def test_captured_in_a_graph():
    weight = to_device(random_packed("int4-g64", 96, 768))
    x = tokens(4, 768, torch.float16)
    first = packed_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = packed_linear(x, weight)
        out2 = packed_linear(out[:, :96].repeat(1, 8), weight)
    x.copy_(tokens(4, 768, torch.float16, seed=9))
    graph.replay()
    assert torch.equal(out, packed_linear(x, weight)) and not torch.equal(out, first)
    assert torch.equal(out2, packed_linear(out.repeat(1, 8), weight))


def test_no_bf16_before_ampere():
    if launch.target_of(0).has_bf16:
        pytest.skip("this card has bf16")
    with pytest.raises(UnsupportedCardError, match=r"needs compute capability 8\.0, this is 7\.5"):
        packed_linear(tokens(1, 64, torch.bfloat16), to_device(random_packed("int4-g64", 16, 64)))
