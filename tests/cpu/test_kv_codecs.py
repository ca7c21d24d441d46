"""The KV codecs of fewer bits: layouts, round trips, exact mode, and what they do to a model's answers."""

from pathlib import Path

import numpy as np
import pytest
import torch

import oracle
import smollm2
from engines import ask, load_folder, make_engine, one_pass, tiny_model
from packhorse.core.config import KV_CHOICES, EngineConfig
from packhorse.core.errors import UsageError
from packhorse.core.formats import KV_FORMATS, kv_token_bytes
from packhorse.core.units import GIB
from packhorse.engine.session import Session
from packhorse.facts.read import read_model
from packhorse.plan.size import size_engine
from packhorse.quant.codec import hadamard, make_codec
from packhorse.store.kv import KVStore
from packhorse.store.tier import StoreGeometry
from packhorse.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]

CODED = ["fp8", "k5v4", "k4v4"]
PAGE, HEADS, DIM, NUM = 4, 3, 64, 8


def make(name: str, dim: int = DIM):
    codec = make_codec(name, torch.float32, HEADS, dim, PAGE)
    raw = torch.full((NUM, codec.page_bytes), 0xFF, dtype=torch.uint8)
    return codec, raw, codec.bind(raw)


def values(length: int, dim: int = DIM, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, length, HEADS, dim, generator=torch.Generator().manual_seed(seed))
    return k, v


def test_bytes_of_35b_and_27b():
    """Ten full-attention layers of 2 heads of 256; sixteen of 4."""
    token = {name: 10 * kv_token_bytes(name, 2, 256) for name in KV_FORMATS}
    assert token == {
        "fp32": 40960, "fp16": 20480, "bf16": 20480, "fp8": 10240, "k5v4": 6400, "k4v4": 5760,
    }  # fmt: skip
    assert 16 * kv_token_bytes("fp8", 4, 256) == 32 * 1024
    for name in KV_FORMATS:
        codec = make_codec(name, torch.float16, 2, 256, 64)
        assert codec.page_bytes == 64 * kv_token_bytes(name, 2, 256)
        assert codec.name == name and codec.format.version == 1
    assert len({form.id for form in KV_FORMATS.values()}) == len(KV_FORMATS)


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_hadamard(dim):
    """The matrix of (-1)^popcount(i & j) over sqrt(D); its own inverse; a row's bits are its own."""
    index = torch.arange(dim)
    signs = torch.tensor([[(-1.0) ** (int(i & j)).bit_count() for j in index] for i in index])
    x = torch.randn(7, 3, dim, generator=torch.Generator().manual_seed(dim))
    want = x.double() @ signs.double() / dim**0.5
    assert (hadamard(x).double() - want).abs().max() < 2e-6
    assert (hadamard(hadamard(x)) - x).abs().max() < 2e-6
    assert torch.equal(hadamard(x[4:5, 1]), hadamard(x)[4:5, 1])


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("page_ids", [range(2, 6), [2, 3, 4, 5], [5, 0, 7, 2], [1]])
def test_parts_written_are_read_as_the_whole(name, page_ids):
    """Any cut of writes and reads gives the bits of one; other pages stay."""
    _, raw, pages = make(name)
    _, _, whole = make(name)
    total = len(page_ids) * PAGE
    k, v = values(total)
    whole.write(range(len(page_ids)), 0, k, v)
    want_k, want_v = whole.read(range(len(page_ids)), 0, total)
    for start, stop in ((0, 1), (1, 3), (3, total)):
        pages.write(page_ids, start, k[start:stop], v[start:stop])
    for start in range(0, total, 3):
        for stop in range(start + 1, total + 1):
            read_k, read_v = pages.read(page_ids, start, stop)
            assert torch.equal(read_k, want_k[start:stop]) and torch.equal(read_v, want_v[start:stop])
    untouched = [p for p in range(NUM) if p not in page_ids]
    assert bool((raw[untouched] == 0xFF).all())


def test_fp8_rounds_to_nearest_counts_and_keeps_nan():
    _, raw, pages = make("fp8")
    k, v = values(PAGE)
    k[0, 0, :6] = torch.tensor([448.0, 449.0, -1e6, 2.0**-6, 0.99 * 2.0**-6, float("inf")])
    v[0, 0, :3] = torch.tensor([0.0, -(2.0**-11), float("nan")])
    want = {"saturated": 3, "subnormal": 0}
    want["subnormal"] = int(sum(((x.abs() < 2**-6) & (x.abs() > 0)).sum() for x in (k, v)))
    pages.write(range(1, 2), 0, k, v)
    assert pages.counts == want and want["subnormal"] > 5
    read_k, read_v = pages.read(range(1, 2), 0, PAGE)
    assert read_k[0, 0, :3].tolist() == [448.0, 448.0, -448.0] and read_k[0, 0, 5] == 448.0
    assert read_v[0, 0, 2].isnan() and int(read_v.isnan().sum()) == 1
    size = k.abs().clamp(max=448)
    # Half a step: 1/16 of a value, 2^-10 below the normal range.
    assert bool(((read_k.abs() - size).abs() <= torch.maximum(size / 16, torch.tensor(2.0**-10))).all())
    pages.write(range(1, 2), 0, k, v)
    assert pages.counts["saturated"] == 6
    assert torch.equal(raw[1].view(torch.float8_e4m3fn).view(HEADS, 2, PAGE, DIM)[2, 0].float(), read_k[:, 2])


@pytest.mark.parametrize("dim", [32, 64, 256])
@pytest.mark.parametrize(("name", "bits"), [("k5v4", 5), ("k4v4", 4)])
def test_group_layout_by_hand(name, bits, dim):
    """The planes of one page read bit by bit with numpy, as GroupCodec's docstring says."""
    codec, raw, pages = make(name, dim)
    k, v = values(PAGE, dim)
    pages.write(range(3, 4), 0, k, v)
    got_k, got_v = pages.read(range(3, 4), 0, PAGE)
    heads = raw[3].numpy().reshape(HEADS, -1)
    for head in range(HEADS):
        at = 0
        for got, num_bits in ((got_k, bits), (got_v, 4)):
            codes = heads[head, at : (at := at + PAGE * dim // 2)].view("<u4").reshape(PAGE, dim // 8)
            high = np.zeros((PAGE, dim // 32), "<u4")
            if num_bits == 5:
                high = heads[head, at : (at := at + PAGE * dim // 8)].view("<u4").reshape(PAGE, dim // 32)
            scales = heads[head, at : (at := at + PAGE * dim // 16)].view("<f2").reshape(PAGE, dim // 32)
            for token in range(PAGE):
                for d in range(dim):
                    bit = 4 * (d % 8 // 2) + 16 * (d % 2)
                    code = (int(codes[token, d // 8]) >> bit) & 15
                    if num_bits == 5:
                        code |= (int(high[token, d // 32]) >> (bit + d % 32 // 8) & 1) << 4
                    want = (code - 2 ** (num_bits - 1)) * float(scales[token, d // 32])
                    assert float(got[token, head, d]) == want
        assert at == heads.shape[1]
    assert codec.page_bytes == heads.size


@pytest.mark.parametrize("name", ["k5v4", "k4v4"])
def test_group_round_trip(name):
    """Half a step of the group's extreme, or one step where a value of that size has the other sign; and of
    Gaussian values no more than their share: 8.6 % at 4 bits, 4.3 % at 5."""
    codec = make_codec(name, torch.float32, HEADS, 256, 64)
    pages = codec.bind(torch.full((1, codec.page_bytes), 0xFF, dtype=torch.uint8))
    k, v = torch.randn(2, 64, HEADS, 256, generator=torch.Generator().manual_seed(3))
    k[5, 1] = 0
    k[6, 1, 7] = 1e4
    v[9] *= 1e-7
    pages.write(range(1), 0, k, v)
    bits = KV_FORMATS[name].k_bits, KV_FORMATS[name].v_bits
    for x, got, num_bits in zip((k, v), pages.read(range(1), 0, 64), bits, strict=True):
        want = hadamard(x).unflatten(-1, (-1, 32))
        error = (got.unflatten(-1, (-1, 32)) - want).abs()
        extreme = want.abs().amax(-1, keepdim=True)
        step = extreme / 2 ** (num_bits - 1)
        # fp16 scales: 2^-11 of a value, and 2^-25 a step where they are subnormal.
        slack = extreme * 2.0**-11 + 2.0 ** (num_bits - 1 - 25)
        outer = want.abs() > extreme - 0.5 * step
        assert bool((error <= torch.where(outer, step, step / 2) + slack).all())
        rows, got_rows = want[16:], got.unflatten(-1, (-1, 32))[16:]
        rms = float((got_rows - rows).pow(2).mean().sqrt() / rows.pow(2).mean().sqrt())
        assert rms < {4: 0.0885, 5: 0.0445}[num_bits]
    assert not pages.read(range(1), 0, 64)[0][5, 1].any()


@pytest.mark.parametrize("name", ["k5v4", "k4v4"])
def test_a_nan_is_not_hidden(name):
    _, _, pages = make(name)
    k, v = values(PAGE)
    k[1, 2, 3] = torch.nan
    pages.write(range(1), 0, k, v)
    read_k, read_v = pages.read(range(1), 0, PAGE)
    assert bool(read_k[1, 2].isnan().all()) and int(read_k.isnan().sum()) == DIM
    assert bool(read_v.isfinite().all())


def test_refusals():
    with pytest.raises(UsageError, match="'k3v3' is not known") as caught:
        EngineConfig(kv="k3v3")
    assert all(name in caught.value.hint for name in KV_CHOICES)
    with pytest.raises(UsageError, match="power of two from 32 on, and this model's have 96"):
        make_codec("k5v4", torch.float32, 2, 96, 64)


# In a model


@pytest.mark.parametrize("name", ["fp16", "bf16", *CODED])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3"])
def test_exact_mode_holds_in_every_codec(family, name):
    """One shot, in chunks of a page, reused, and token by token: the same bits, and not those of fp32."""
    model = tiny_model(family, True)
    ids = oracle.random_ids(200)
    want = one_pass(model, ids, name)
    assert not torch.equal(want, one_pass(model, ids))
    reuse = make_engine(model, num_pages=90, kv=name)
    for n, cached in ((1, 0), (63, 0), (64, 0), (65, 64), (130, 64), (200, 128)):
        engine = make_engine(model, num_pages=90, chunk_len=64, kv=name)
        ask(engine, ids[:n])
        assert torch.equal(engine.runner.logits["r", n - 1], want[n - 1]), f"chunked {n}"
        _, event = ask(reuse, ids[:n])
        assert event.usage.cached_len == cached
        assert torch.equal(reuse.runner.logits["r", n - 1], want[n - 1]), f"reused {n}"
    stepped = make_engine(model, num_pages=90, kv=name)
    tokens, _ = ask(stepped, ids[:60], max_tokens=12)
    again = one_pass(model, ids[:60] + tokens, name)
    assert all(torch.equal(stepped.runner.logits["r", 59 + i], again[59 + i]) for i in range(12))


# Mean KL divergence from fp32 in nats, at most, and share of equal likeliest tokens, at least: about twice the
# distance that was measured.
KL_BOUNDS = {
    "recall-hybrid": {
        "fp16": (1e-6, 0.999), "bf16": (3e-5, 0.997), "fp8": (9e-3, 0.965),
        "k5v4": (1.3e-2, 0.945), "k4v4": (4e-2, 0.92),
    },
    "SmolLM2": {"fp8": (1.1e-2, 0.92), "k5v4": (2.5e-2, 0.87), "k4v4": (9e-2, 0.78)},
}  # fmt: skip


@pytest.mark.parametrize("which", KL_BOUNDS)
def test_divergence_from_fp32(which):
    path, num_tokens = (ROOT / "assets/recall-hybrid", 1000)
    if which == "SmolLM2":
        path, num_tokens = smollm2.smollm2(), 128
    model = load_folder(path)
    text = (ROOT / "src/packhorse/text/data/demo.md").read_text()
    ids = Tokenizer.load(model.facts).encode(text)[:num_tokens]
    assert len(ids) == num_tokens
    want = one_pass(model, ids).double().log_softmax(-1)
    for name, (most, least) in KL_BOUNDS[which].items():
        got = one_pass(model, ids, name).double().log_softmax(-1)
        divergence = float((want.exp() * (want - got)).sum(-1).mean())
        same = float((want.argmax(-1) == got.argmax(-1)).double().mean())
        assert 0 < divergence < most and same >= least, f"{name}: KL {divergence:.2e}, top-1 {same:.4f}"


def test_pools_are_those_of_the_codec_and_said_at_start():
    facts = read_model(ROOT / "assets/recall-hybrid")
    for kv in KV_CHOICES:
        sizes = size_engine(facts, EngineConfig(context=1000, kv=kv), "fp32", 8 * GIB)
        store = KVStore(
            StoreGeometry.of(facts, torch.float32, 64, sizes.kv),
            num_pages=sizes.num_pages,
            sequences=4,
            snapshots=0,
            snapshot_len=8192,
        )
        assert sizes.kv == ("fp32" if kv == "auto" else kv)
        assert store.storage_bytes["pages"] == sizes.kv_bytes
        assert sizes.kv_bytes == sizes.num_pages * 64 * 2 * kv_token_bytes(sizes.kv, 2, 128)
    session = Session.open(ROOT / "assets/recall-hybrid", EngineConfig(context=512, sequences=1, kv="fp8"))
    assert any("in fp8 for 512 tokens" in note for note in session.notes)
    session.answer("Who?", max_tokens=2)
    misfits = session.engine.store.kv_misfits
    assert misfits["saturated"] == 0 and misfits["subnormal"] > 0
