"""Pages of codes read and written by kernels, and heads turned, against the torch codec on the same card."""

import pytest
import torch
from torch import Tensor

from packhorse.core.units import ceil_div
from packhorse.kernels import dispatch
from packhorse.kernels.attention import pages, rotate
from packhorse.kernels.cuda.launch import has_type, prepare
from packhorse.quant.codec import GroupCodec, GroupPages, hadamard, make_codec

pytestmark = pytest.mark.gpu

PAGE, NUM = 64, 7
CODECS = ["k5v4", "k4v4"]
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Pages, first token and end: whole pages, parts of the first and of the last, one token, none of the first page.
RANGES = [
    (range(2, 5), 0, 192),
    (range(2, 5), 3, 130),
    ([6, 0, 3], 0, 192),
    ([6, 0, 3], 63, 129),
    ([5], 10, 11),
    (range(1, 7), 100, 340),
    ([4, 1, 0], 127, 128),
]


def make(name: str, heads: int, dim: int, dtype: torch.dtype) -> GroupCodec:
    if not has_type(torch.device("cuda"), dtype):
        pytest.skip("bf16 needs compute capability 8.0")
    codec = make_codec(name, dtype, heads, dim, PAGE)
    assert isinstance(codec, GroupCodec)
    return codec


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """All variants at once, on all cores."""
    device = torch.device("cuda")
    dtypes = [dtype for dtype in TYPES.values() if has_type(device, dtype)]
    forms = [
        pages.variants(name, dim, dtype) for name in CODECS for dim in (64, 128, 256) for dtype in dtypes
    ]
    prepare([variant for form in forms for variant in form.values()], device)


def values(length: int, heads: int, dim: int, seed: int = 0) -> Tensor:
    """Of very different sizes, a head of zeros, and one value that takes its group's range."""
    x = torch.randn(length, heads, dim, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-2, 3, length)[:, None, None]
    x[0, 0] = 0
    x[-1, -1, 5] = -2e4
    return x.cuda()


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """NaN equals NaN, and the sign of a zero counts."""
    assert got.dtype == want.dtype and got.shape == want.shape
    bits = [x.contiguous().view(torch.int16).masked_fill(x.isnan(), 0x7FFF) for x in (got, want)]
    assert torch.equal(*bits)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", CODECS)
def test_any_bytes_are_read_as_the_codec_reads_them(name, dim, dtype, monkeypatch):
    """Every code beside every kind of scale: infinite, NaN, subnormal. What a kernel leaves out stays 123."""
    codec = make(name, 3, dim, TYPES[dtype])
    seeded = torch.Generator().manual_seed(dim)
    raw = torch.randint(0, 256, (NUM, codec.page_bytes), dtype=torch.uint8, generator=seeded).cuda()
    card, twin = pages.CardPages(codec, raw), codec.bind(raw)
    for page_ids, start, stop in RANGES:
        want = twin.read(page_ids, start, stop)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *shape, **kind: torch.full(shape, 123.0, **kind))
            got = card.read(page_ids, start, stop)
        for one, other in zip(got, want, strict=True):
            assert bool(other.isnan().any() and other.isfinite().any()) or stop - start == 1
            assert_same_bits(one, other)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", CODECS)
def test_written_bytes_are_those_of_the_codec(name, dim, kind):
    """From slices of wider rows, as projections are; V of another type than K; other bytes are left alone."""
    codec = make(name, 2, dim, torch.float16)
    stored = torch.float32 if kind == "fp32" else TYPES[kind]
    want = torch.full((NUM, codec.page_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    got = want.clone()
    for page_ids, start, stop in RANGES:
        rows = values(stop - start, 5, dim, seed=stop).to(stored)
        for k, v in ((rows[:, :2], rows[:, 3:]), (rows[:, 1:3].contiguous(), rows[:, 3:].float())):
            codec.bind(want).write(page_ids, start, k, v)
            pages.CardPages(codec, got).write(page_ids, start, k, v)
            assert torch.equal(got, want)
        got.fill_(0xFF)
        want.fill_(0xFF)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_turned_heads(dim, kind):
    """Of slices and of whole tensors, to the bit; a NaN stays in its head."""
    dtype, computed = TYPES.get(kind, torch.float32), TYPES.get(kind, torch.float16)
    make("k5v4", 1, dim, computed)
    x = values(37, 5, dim).to(dtype)
    for part in (x, x[:, 1:4]):
        assert rotate.fits(part, computed)
        got = rotate.hadamard(part)
        assert got.dtype == dtype and torch.equal(got, hadamard(part))
        assert torch.equal(dispatch.turned(part, computed), got)
    assert not rotate.fits(x.transpose(0, 1), computed) and not rotate.fits(x, torch.float32)
    x[3, 2, 1] = torch.nan
    got = rotate.hadamard(x)
    assert bool(got[3, 2].isnan().all()) and int(got.isnan().sum()) == dim


@pytest.mark.parametrize("name", CODECS)
def test_a_nan_is_not_hidden(name):
    codec = make(name, 3, 128, torch.float16)
    raw = torch.full((1, codec.page_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    k, v = values(PAGE, 3, 128), values(PAGE, 3, 128, seed=1)
    k[1, 2, 3] = torch.nan
    card = pages.CardPages(codec, raw)
    card.write(range(1), 0, k, v)
    read_k, read_v = card.read(range(1), 0, PAGE)
    assert bool(read_k[1, 2].isnan().all()) and int(read_k.isnan().sum()) == 128
    assert bool(read_v.isfinite().all())


@pytest.mark.parametrize("heads", [1, 8])
def test_long_prompts(heads):
    """Of more tokens than a grid's second dimension takes."""
    codec = make("k5v4", heads, 64, torch.float16)
    length = 70_001
    num = ceil_div(length, PAGE)
    page_ids = torch.randperm(num, generator=torch.Generator().manual_seed(1)).tolist()
    k, v = values(length, heads, 64), values(length, heads, 64, seed=1)
    want = torch.full((num, codec.page_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    got = want.clone()
    codec.bind(want).write(page_ids, 0, k, v)
    card = pages.CardPages(codec, got)
    card.write(page_ids, 0, k, v)
    assert torch.equal(got, want)
    for one, other in zip(
        card.read(page_ids, 0, length), codec.bind(want).read(page_ids, 0, length), strict=True
    ):
        assert_same_bits(one, other)


def test_who_gets_the_kernels():
    """Pages of codes that are read in 16 bits, of heads that there are kernels for."""
    for name, dtype, dim, page_len in (
        ("k5v4", torch.float16, 128, 64),
        ("k4v4", torch.float16, 256, 64),
        ("k5v4", torch.float32, 128, 64),
        ("k5v4", torch.float16, 32, 64),
        ("k5v4", torch.float16, 128, 4),
        ("fp8", torch.float16, 128, 64),
    ):
        codec = make_codec(name, dtype, 2, dim, page_len)
        raw = torch.zeros(2, codec.page_bytes, dtype=torch.uint8, device="cuda")
        wanted = dtype == torch.float16 and dim > 32 and page_len == 64 and name != "fp8"
        bound = dispatch.bind_pages(codec, raw)
        assert isinstance(bound, pages.CardPages) == wanted
        assert isinstance(bound, GroupPages) == (not wanted and name != "fp8")
