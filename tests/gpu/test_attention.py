"""Paged attention and the KV write on a card, against float64 over what the torch codec stores."""

import pytest
import torch
from torch import Tensor

from packhorse.core.errors import UnsupportedCardError, UsageError
from packhorse.core.units import ceil_div
from packhorse.kernels.attention.cuda import DecodeBatch, PagedAttention, split_len
from packhorse.kernels.cuda.launch import prepare, target_of
from packhorse.kernels.norm.ref import rms_norm
from packhorse.kernels.rope.ref import apply_rope
from packhorse.quant.codec import hadamard, make_codec

pytestmark = pytest.mark.gpu

PAGE = 64
CODECS = ["fp16", "bf16", "fp8", "k5v4", "k4v4"]
# Of the largest wanted value: probabilities, values and the output are rounded to 11 (fp16) or 8 bits (bf16).
BOUND = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """All variants at once, on all cores."""
    device = torch.device("cuda")
    forms = [PagedAttention(c, 2, 2, d, torch.float16, 1, 1, 100) for c in CODECS for d in (64, 128, 256)]
    forms.append(PagedAttention("fp8", 2, 2, 256, torch.bfloat16, 1, 1, 100))
    variants = [v for form in forms for v in form.variants.values()]
    prepare([v for v in variants if v.min_arch <= target_of(device).arch], device)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def make_batch(spans: list[tuple[int, int]], pages_of: list[list[int]], room: int = 1) -> DecodeBatch:
    """spans: (position, tokens) of each sequence; rows lie one after another, then `room` rows of nobody."""
    longest = max(map(len, pages_of))
    table = [ids + [2**30] * (longest - len(ids)) for ids in pages_of]
    first, rows, places = [], [], []
    for i, (position, tokens) in enumerate(spans):
        first.append(len(rows))
        rows += [i] * tokens
        places += range(position, position + tokens)
    return DecodeBatch(
        int32(table),
        int32(first),
        int32([n for _, n in spans]),
        int32([p for p, _ in spans]),
        int32(rows + [-1] * room),
        int32(places + [0] * room),
    )


def need(kernels: PagedAttention) -> None:
    """Skips what the card's generation lacks, having seen that it is refused."""
    target = target_of(torch.device("cuda"))
    if target.arch < kernels.variants["attend_split"].min_arch:
        with pytest.raises(UnsupportedCardError):
            target.check(kernels.variants["attend_split"])
        pytest.skip("bf16 needs compute capability 8.0")


class Case:
    """Pages with random K and V for some spans, everything else NaN."""

    def __init__(
        self, codec: str, heads: tuple[int, int], dim: int, spans: list[tuple[int, int]], dtype=torch.float16
    ):
        self.spans, (num_q, num_kv) = spans, heads
        lens = [position + tokens for position, tokens in spans]
        self.kernels = PagedAttention(
            codec, num_q, num_kv, dim, dtype, len(spans), max(n for _, n in spans), max(lens) + 500
        )
        self.codec = make_codec(codec, torch.float32, num_kv, dim, PAGE)
        needed = [ceil_div(n, PAGE) for n in lens]
        order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1)).tolist()
        self.page_ids = [[order.pop() for _ in range(n)] for n in needed]
        self.raw = torch.full(
            (sum(needed) + 3, self.codec.page_bytes), 0xFF, dtype=torch.uint8, device="cuda"
        )
        pages = self.codec.bind(self.raw)
        self.stored = []
        for i, (ids, n) in enumerate(zip(self.page_ids, lens, strict=True)):
            k, v = randn(n, num_kv, dim, seed=10 + i), randn(n, num_kv, dim, seed=50 + i)
            if n:
                pages.write(ids, 0, k, v)
                k, v = pages.read(ids, 0, n)
            self.stored.append((k, v))
        self.batch = make_batch(spans, self.page_ids)
        rows = self.batch.row_sequence.shape[0]
        q = 2 * randn(rows, num_q, dim, seed=99)
        self.queries = (hadamard(q) if self.codec.format.rotated else q).to(self.kernels.math_dtype)
        self.gate = randn(rows, num_q, dim, seed=98).to(dtype)

    def run(self, gated: bool = False) -> Tensor:
        out = torch.full(self.queries.shape, torch.nan, dtype=self.kernels.dtype, device="cuda")
        workspace = torch.full((self.kernels.workspace_floats,), torch.nan, device="cuda")
        gate = self.gate if gated else None
        self.kernels.attend(self.raw, self.queries, self.batch, out, workspace, gate=gate)
        return out

    def want(self, gated: bool = False) -> Tensor:
        outs = []
        for i, ((position, tokens), (k, v)) in enumerate(zip(self.spans, self.stored, strict=True)):
            first = int(self.batch.first_row[i])
            q = self.queries[first : first + tokens].double()
            group = q.shape[1] // k.shape[1]
            k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
            scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
            at = torch.arange(k.shape[0], device="cuda")
            hidden = at[None] > torch.arange(position, position + tokens, device="cuda")[:, None]
            scores = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out = torch.einsum("hts,shd->thd", scores, v)
            if self.codec.format.rotated:
                out = hadamard(out.float()).double()
            outs.append(out * self.gate[first : first + tokens].double().sigmoid() if gated else out)
        return torch.cat(outs)


def close(got: Tensor, want: Tensor, bound: float) -> None:
    assert bool(got.isfinite().all())
    error = float((got.double() - want).abs().max() / want.abs().max())
    assert error <= bound, f"relative error {error:.1e} above {bound:.0e}"


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("codec", CODECS)
def test_lengths_tokens_and_pages(codec, dim):
    """Lengths around tiles, pages and splits, 1 to 16 tokens, one sequence without any; gated and not."""
    spans = [(0, 1), (14, 3), (62, 5), (127, 1), (128, 16), (0, 0), (191, 2), (1000, 4), (4093, 16)]
    case = Case(codec, (8, 2), dim, spans)
    need(case.kernels)
    bound = BOUND[case.kernels.math_dtype]
    for gated in (False, True):
        got = case.run(gated)
        close(got[:-1], case.want(gated), bound)
        assert bool(got[-1].isnan().all()), "a row of nobody was written"


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("codec", CODECS)
def test_groups(codec, group):
    case = Case(codec, (2 * group, 2), 128, [(700, 16), (65, 1), (3, 7)])
    need(case.kernels)
    close(case.run()[:-1], case.want(), BOUND[case.kernels.math_dtype])


def test_bf16_activations():
    case = Case("fp8", (8, 1), 256, [(300, 2)], torch.bfloat16)
    need(case.kernels)
    close(case.run(True)[:-1], case.want(True), BOUND[torch.bfloat16])


@pytest.mark.parametrize(("codec", "dim"), [("fp16", 64), ("fp8", 64), ("k5v4", 64), ("k4v4", 128)])
def test_bits_do_not_depend_on_who_else_is_asked(codec, dim):
    """Sixteen tokens at once, one at a time, alone and in a batch, also where the split length changes."""
    splits = PagedAttention(codec, 4, 1, dim, torch.float16, 1, 1, 1).splits(torch.device("cuda"))
    change = splits * 128
    assert split_len(change, splits) == 128 and split_len(change + 1, splits) == 192
    case = Case(codec, (4, 1), dim, [(change - 9, 16), (100, 3), (37, 1)])
    together = case.run()
    close(together[:-1], case.want(), BOUND[torch.float16])
    for i, (position, tokens) in enumerate(case.spans):
        for t in range(tokens):
            row = int(case.batch.first_row[i]) + t
            alone = make_batch([(position + t, 1)], [case.page_ids[i]])
            kernels = PagedAttention(codec, 4, 1, dim, torch.float16, 1, 1, 3 * change)
            out = torch.full((2, 4, dim), torch.nan, dtype=torch.float16, device="cuda")
            workspace = torch.full((kernels.workspace_floats,), torch.nan, device="cuda")
            kernels.attend(case.raw, case.queries[row : row + 2].contiguous(), alone, out, workspace)
            assert torch.equal(out[0], together[row]), f"sequence {i}, token {t}"


@pytest.mark.parametrize("num_kv", [1, 2, 8])
def test_long_contexts(num_kv):
    """Splits whose lengths are no powers of two; with 8 KV heads of more than 64 pages each."""
    length = 450_000 if num_kv == 8 else 100_003
    case = Case("fp8", (2 * num_kv, num_kv), 64, [(length, 1), (5000, 1)])
    close(case.run()[:-1], case.want(), BOUND[torch.float16])


@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("codec", ["fp16", "k5v4"])
def test_flat_and_peaked_scores(codec, scale):
    """All keys nearly alike over 20,000 of them, and one key that takes all."""
    case = Case(codec, (2, 1), 64, [(20_000, 1)])
    case.queries *= scale
    close(case.run()[:-1], case.want(), BOUND[torch.float16])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("codec", CODECS)
def test_written_bytes_are_those_of_the_codec(codec, dim):
    """Without norm and rope: the same bytes, queries in the codec's basis, misfits counted, other bytes left alone."""
    num_q, num_kv, spans = 3, 2, [(62, 5), (0, 1), (511, 2)]
    kernels = PagedAttention(codec, 6, 2, dim, torch.float16, 3, 5, 600)
    need(kernels)
    num_q = kernels.num_heads
    rows = randn(9, num_q + 2 * num_kv, dim, seed=3)
    rows[0, -1, :4] = torch.tensor([500.0, -1e4, 1e-4, 0.0])
    rows[1, -3] = 0
    made = make_codec(codec, torch.float32, num_kv, dim, PAGE)
    got = torch.full((12, made.page_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    want = got.clone()
    page_ids = [[7, 3], [0], list(range(2, 11))]
    pages = made.bind(want)
    for (position, tokens), ids, first in zip(spans, page_ids, (0, 5, 6), strict=True):
        at = position // PAGE
        part = rows[first : first + tokens]
        pages.write(ids[at:], position % PAGE, part[:, num_q : num_q + num_kv], part[:, num_q + num_kv :])
    queries = torch.full((9, num_q, dim), torch.nan, dtype=kernels.math_dtype, device="cuda")
    misfits = torch.zeros(2, dtype=torch.int64, device="cuda")
    batch = make_batch(spans, page_ids)
    kernels.write(
        got, rows.flatten(1), batch, queries, norms=None, eps=0.0, cos_sin=None, gated=False, misfits=misfits
    )
    assert torch.equal(got, want)
    assert misfits.tolist() == [pages.counts.get("saturated", 0), pages.counts.get("subnormal", 0)]
    turned = hadamard(rows[:-1, :num_q]) if made.format.rotated else rows[:-1, :num_q]
    assert torch.equal(queries[:-1], turned.to(kernels.math_dtype))
    assert bool(queries[-1].isnan().all())


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (128, 32), (256, 64)])
def test_norm_and_rope(dim, rotary, fp32):
    """As the layers do it, in gated projections: within a rounding of the stored type."""
    kernels = PagedAttention("fp16", 4, 2, dim, torch.float16, 1, 3, 100)
    rows = randn(3, 4 + 4 + 2 + 2, dim, seed=3)
    rows = rows if fp32 else rows.half()
    norms = (1 + 0.1 * randn(dim, seed=4), 1 + 0.1 * randn(dim, seed=5))
    angles = 50 * randn(3, 1, rotary // 2, seed=6)
    cos_sin = angles.cos(), angles.sin()
    codec = make_codec("fp16", torch.float32, 2, dim, PAGE)
    raw = torch.full((2, codec.page_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    queries = torch.empty(3, 4, dim, dtype=torch.float16, device="cuda")
    batch = make_batch([(62, 3)], [[1, 0]], room=0)
    misfits = torch.zeros(2, dtype=torch.int64, device="cuda")
    kernels.write(
        raw,
        rows.flatten(1),
        batch,
        queries,
        norms=norms,
        eps=1e-6,
        cos_sin=cos_sin,
        gated=True,
        misfits=misfits,
    )
    k, v = codec.bind(raw).read([1, 0], 62, 65)
    for got, part, norm in ((queries, rows[:, :4], norms[0]), (k, rows[:, 8:10], norms[1])):
        want = apply_rope(rms_norm(part, norm, 1e-6, torch.float32), *cos_sin)
        assert ((got.float() - want).abs() <= 2**-10.9 * want.abs() + 1e-6).all()
    assert torch.equal(v, rows[:, 10:].half().float())


def test_a_graph_follows_its_tensors():
    """One capture of write and attention, replayed at other positions and pages: the bits of plain launches."""
    kernels = PagedAttention("k5v4", 4, 2, 128, torch.float16, 2, 2, 5000)
    codec = make_codec("k5v4", torch.float32, 2, 128, PAGE)
    raw = torch.full((90, codec.page_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    table = torch.randperm(80, generator=torch.Generator().manual_seed(2)).view(2, 40)
    for ids in table.tolist():
        codec.bind(raw).write(ids, 0, randn(2560, 2, 128, seed=7), randn(2560, 2, 128, seed=8))
    first = make_batch([(5, 1), (70, 1)], table.tolist(), room=0)
    rows = randn(2, 8 * 128, seed=9)
    queries = torch.empty(2, 4, 128, dtype=torch.float16, device="cuda")
    out = torch.empty(2, 4, 128, dtype=torch.float16, device="cuda")
    workspace = torch.full((kernels.workspace_floats,), torch.nan, device="cuda")
    misfits = torch.zeros(2, dtype=torch.int64, device="cuda")

    def step() -> None:
        kernels.write(
            raw, rows, first, queries, norms=None, eps=0.0, cos_sin=None, gated=False, misfits=misfits
        )
        kernels.attend(raw, queries, first, out, workspace)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for spans in ([(6, 1), (71, 1)], [(2300, 1), (64, 1)], [(63, 2), (0, 0)]):
        for kept, new in zip(first, make_batch(spans, table.flip(0).tolist(), room=0), strict=True):
            kept.copy_(new)
        rows.copy_(randn(2, 8 * 128, seed=spans[0][0]))
        before = raw.clone()
        out.fill_(torch.nan)
        graph.replay()
        replayed, written = out.clone(), raw.clone()
        raw.copy_(before)
        out.fill_(torch.nan)
        step()
        assert torch.equal(out, replayed) and torch.equal(raw, written)
        assert bool(out.isfinite().all()) and not torch.equal(before, written)


def test_forms_that_are_not_built_are_refused():
    for change in (
        {"codec": "fp32"},
        {"num_heads": 18},
        {"head_dim": 96},
        {"max_tokens": 17},
        {"max_len": 2**21},
    ):
        fields = {"codec": "fp8", "num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "sequences": 1}
        fields |= {"max_tokens": 1, "max_len": 100}
        with pytest.raises(UsageError, match="have no form for"):
            PagedAttention(**(fields | change), dtype=torch.float16)
