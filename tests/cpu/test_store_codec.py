"""The plain codec: what is written is read, as views where pages are consecutive."""

import pytest
import torch

from packhorse.core.formats import kv_token_bytes
from packhorse.quant.codec import PlainCodec

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAGE, HEADS, DIM, NUM = 4, 3, 5, 8


def make(dtype: torch.dtype):
    codec = PlainCodec(dtype, HEADS, DIM, PAGE)
    raw = torch.full((NUM, codec.page_bytes), 0xFF, dtype=torch.uint8)
    return codec, raw, codec.bind(raw)


def values(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, length, HEADS, DIM, generator=generator)
    return k, v


@pytest.mark.parametrize("dtype", DTYPES)
def test_facts(dtype):
    codec, _, _ = make(dtype)
    assert codec.name == {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert codec.page_bytes == PAGE * kv_token_bytes(codec.name, HEADS, DIM) == PAGE * 2 * 15 * dtype.itemsize


def test_other_types_are_refused():
    with pytest.raises(AssertionError, match="no compute type"):
        PlainCodec(torch.float64, 1, 1, 1)


def test_layout_of_a_page():
    """[page_len, 2, Hkv, D]: the form that `version` 1 stands for."""
    codec, raw, pages = make(torch.float32)
    k, v = values(PAGE)
    pages.write(range(2, 3), 0, k, v)
    assert codec.format.version == 1
    assert torch.equal(raw[2].view(torch.float32), torch.stack((k, v), dim=1).flatten())
    assert bool((raw[[0, 1, *range(3, NUM)]] == 0xFF).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_ids", [range(2, 6), [2, 3, 4, 5], [5, 0, 7, 2], [1]])
def test_written_is_read(dtype, page_ids):
    _, raw, pages = make(dtype)
    total = len(page_ids) * PAGE
    k, v = values(total)
    for start, stop in ((0, 1), (1, 3), (3, total)):
        pages.write(page_ids, start, k[start:stop], v[start:stop])
    for start in range(total):
        for stop in range(start + 1, total + 1):
            read_k, read_v = pages.read(page_ids, start, stop)
            assert torch.equal(read_k, k[start:stop].to(dtype))
            assert torch.equal(read_v, v[start:stop].to(dtype))
    untouched = [p for p in range(NUM) if p not in page_ids]
    assert bool((raw[untouched] == 0xFF).all())


def test_consecutive_pages_are_one_view_and_others_a_copy_with_the_same_strides():
    _, raw, pages = make(torch.float32)
    view, _ = pages.read(range(1, 4), 2, 11)
    copy, _ = pages.read([1, 2, 3], 2, 11)
    assert view.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()
    assert copy.untyped_storage().data_ptr() != raw.untyped_storage().data_ptr()
    assert view.stride() == copy.stride() == (2 * HEADS * DIM, DIM, 1)


def test_only_the_pages_in_question_are_gathered():
    _, _, pages = make(torch.float32)
    copy, _ = pages.read([6, 1, 3, 5], 5, 7)
    assert copy.untyped_storage().nbytes() == PAGE * 2 * HEADS * DIM * 4
