"""The kernels that are compiled for every supported card without one: what an engine starts with, and the rest."""

from __future__ import annotations

import torch

from packhorse.core.formats import KV_FORMATS, PACKED
from packhorse.kernels.attention import merge, pages, rotate
from packhorse.kernels.attention.cuda import PagedAttention
from packhorse.kernels.conv import cuda as conv
from packhorse.kernels.cuda.nvrtc import Target, Variant
from packhorse.kernels.delta import chunk
from packhorse.kernels.delta import cuda as delta
from packhorse.kernels.experts import combine, mma
from packhorse.kernels.experts import cuda as experts
from packhorse.kernels.experts.cuda import ExpertFills, ExpertTable
from packhorse.kernels.linear import cuda as linear
from packhorse.kernels.linear import dense, gather, unpack
from packhorse.kernels.norm import cuda as norm
from packhorse.kernels.norm import heads

ARCHS = (75, 80, 86, 89, 90, 120)
NEAR = (80, 89)
"""Cards that are near another one: 8.6."""
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
CODECS = ("fp16", "bf16", "fp8", "k5v4", "k4v4")
# What importers and the recipes give.
FORMATS = (
    *("int4-g32", "int4-g64", "int4-g128", "int4z-g32", "int4z-g64", "int4z-g128", "int4m-g32"),
    *("int5-g32", "int5m-g32", "int6-g32", "int8-g32", "int8-g64", "int8-g128", "int8z-g128"),
    *("q4_k", "q5_k", "q6_k", "fp8-g128"),
)
Pairs = list[tuple[Variant, int]]


def packed(name: str, dtype: torch.dtype = FP16, *, fills: bool = False) -> list[Variant]:
    """Products of a format: gemv of 8 tokens, with two row blocks, of 16; router's plan; gate_up and down of 8 and of
    16 tokens. fills: with experts kept as they are read."""
    form = PACKED[name]
    home = torch.zeros(1, 1, dtype=torch.int64)
    table = ExpertTable(home, form, form, 2048, 512, fills=ExpertFills.empty(home, 1) if fills else None)
    return [*linear.variants(form, dtype), *experts.variants(table, dtype)]


def prompt_experts(name: str, dtype: torch.dtype) -> list[Variant]:
    """Products of many tokens' experts: gate_up and down, for tiles of few tokens and of many."""
    table = ExpertTable(torch.zeros(1, 1, dtype=torch.int64), PACKED[name], PACKED[name], 2048, 512)
    return mma.variants(table, dtype)


def attention(codec: str, dim: int, dtype: torch.dtype = FP16) -> dict[str, Variant]:
    """Attention's kernels by name."""
    return PagedAttention(codec, 16, 2, dim, dtype, 1, 1, 262_144).variants


def prompt_pages(codec: str, dim: int, dtype: torch.dtype) -> list[Variant]:
    """What reads and writes pages of codes for prompts, and turns heads."""
    turns = [rotate.variant(dim, kind) for kind in (dtype, FP32)]
    return [*pages.variants(codec, dim, dtype).values(), *turns]


def others(arch: int, dtype: torch.dtype) -> list[Variant]:
    """What has no format: dense products, norms, the delta rule, and what prompts need between products."""
    return [
        dense.variant(FP32, dtype, 16),
        dense.variant(dtype, dtype, 1),
        norm.variant(dtype),
        delta.variant(128, 4, dtype),
        *chunk.variants(128, 128, arch),
        gather.VARIANT,
        merge.variant(dtype),
        *combine.variants(dtype),
        conv.variant(4, dtype),
        heads.variant(dtype, fp32=False, norm=True, gate=None),
        heads.variant(dtype, fp32=True, norm=True, gate="silu"),
        heads.variant(dtype, fp32=True, norm=False, gate="sigmoid"),
    ]


def first_start(arch: int) -> list[Variant]:
    """What an engine compiles for 35B-A3B in int4-g128 with KV in k5v4, in the type that the card computes in."""
    dtype = BF16 if Target(arch).has_bf16 else FP16
    return [
        *packed("int4-g128", dtype, fills=True),
        unpack.variant(PACKED["int4-g128"], dtype),
        *prompt_experts("int4-g128", dtype),
        *attention("k5v4", 256, dtype).values(),
        *prompt_pages("k5v4", 256, dtype),
        *others(arch, dtype),
    ]


def usual() -> Pairs:
    """What CI compiles: `first_start` for every card, for those near another without the forms of few tokens, which
    need fewer registers than those of many, and the forms that are shortest of registers for some."""
    codecs = zip(CODECS, (75, 80, 75, 75, 89), strict=True)
    tight = [
        *((attention(codec, 256)["attend_split"], arch) for codec, arch in codecs),
        (packed("int4-g128")[2], 80),
        (packed("q4_k")[2], 75),
        (packed("q5_k", BF16)[7], 89),
        (packed("q6_k")[6], 86),
        (packed("q6_k")[7], 120),
        (packed("int4-g32", BF16)[7], 86),
        (packed("int8-g32")[2], 75),
        (packed("int8-g128", BF16)[2], 80),
        (packed("fp8-g128")[1], 75),
        (packed("int5m-g32")[2], 80),
        (packed("int4z-g64")[2], 90),
        (packed("int4m-g32")[2], 86),
        (prompt_experts("int8-g64", FP16)[2], 75),
        (prompt_experts("q6_k", BF16)[3], 80),
        (attention("fp8", 64)["write_kv"], 90),
    ]  # fmt: skip
    starts = [pair for pair in starts_of_all() if pair[1] not in NEAR or not _is_of_few(pair[0])]
    return unique([*starts, *tight])


def _is_of_few(variant: Variant) -> bool:
    """Whether it is a product of 8 tokens, or for prompts' experts with few tokens, for which there is a wider form."""
    return ("NT", 2 if variant.source == "experts/mma.cu" else 1) in variant.defines


def starts_of_all() -> Pairs:
    """`first_start` for every card."""
    return [(variant, arch) for arch in ARCHS for variant in first_start(arch)]


def everything() -> Pairs:
    """Every form that a model, a codec and a card lead to. Of the type that a card rarely computes in, and of cards
    that are near another (8.0 and 8.9), only what is shortest of registers: products of 16 tokens, heads of 256; of
    prompts' experts gate_up for tiles of many tokens."""
    pairs = usual() + starts_of_all()
    for arch in ARCHS:
        usual_dtype = BF16 if Target(arch).has_bf16 else FP16
        near = arch in NEAR
        found = [] if near else [unpack.variant(PACKED[name], usual_dtype) for name in FORMATS]
        for dtype in (FP16, BF16):
            products = [variant for name in FORMATS for variant in packed(name, dtype)]
            if dtype is not usual_dtype or near:
                products = [variant for variant in products if ("NT", 2) in variant.defines]
            found += products + others(arch, dtype)
            found += [] if near else [prompt_experts(name, dtype)[2] for name in FORMATS]
            found += [delta.variant(dim, 4, dtype) for dim in delta.HEAD_DIMS]
            for codec in CODECS:
                for dim in (256,) if near else (64, 128, 256):
                    found += attention(codec, dim, dtype).values()
                    found += prompt_pages(codec, dim, dtype) if KV_FORMATS[codec].rotated else []
        for name in ("int4-g32", "q4_k", "q6_k"):
            found += packed(name, usual_dtype, fills=True)
        pairs += [(variant, arch) for variant in found]
    return unique(pairs)


def unique(pairs: Pairs) -> Pairs:
    """Each pair once, without those that the card does not run."""
    return [(variant, arch) for variant, arch in dict.fromkeys(pairs) if variant.min_arch <= arch]
