"""How K and V are stored in pages. Outside this module and the kernels a page is `page_bytes` opaque bytes.

Three kinds, all behind `Codec` and `CodecPages`:

    fp32, fp16, bf16  [page_len, 2, Hkv, D]: token after token, K before V
    fp8               [Hkv, 2, page_len, D]: e4m3 at scale 1.0
    k5v4, k4v4        [Hkv] x (K: codes | high bits, k5 alone | scales; V: codes | scales), each [page_len, ...]

Shape letters: T tokens, S stored tokens, N pages, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from packhorse.core.formats import COMPUTE_DTYPES, KV_FORMATS, KvFormat, check_kv_heads, kv_token_bytes
from packhorse.core.units import ceil_div

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
assert set(_NAMES.values()) == set(COMPUTE_DTYPES)

FP8_MAX = 448.0
"""The largest e4m3 value: what is above is stored as this."""
FP8_MIN_NORMAL = 2.0**-6
"""Below it e4m3 loses precision, step by step down to 2^-9."""


class CodecPages(Protocol):
    """The pages of one layer, read and written in a codec's layout.

    `page_ids` are pages in the order of their tokens, and a token's place is counted from the first token of
    `page_ids[0]`. Give a `range` where ids are consecutive: then nothing is gathered.
    """

    def write(self, page_ids: Sequence[int], start: int, k: Tensor, v: Tensor) -> None:
        """Store k and v, [T, Hkv, D] of any float type, as tokens start .. start + T."""

    def read(self, page_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens start .. stop as stored, each [stop - start, Hkv, D].

        In the basis of `hadamard` where the codec is rotated. Views into the pages, valid as long as nobody
        writes there, where the values need no decoding and `page_ids` is a `range`; else new tensors.
        """

    @property
    def counts(self) -> dict[str, int]:
        """Of the values written so far: how many did not fit the codec, by kind of misfit."""


class Codec(Protocol):
    """A layout of pages, for one shape of heads."""

    @property
    def name(self) -> str:
        """A name of core.formats.KV_FORMATS."""

    @property
    def format(self) -> KvFormat:
        """Id, version and bits."""

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of a layer."""

    @property
    def head_dim(self) -> int:
        """Dims of a head."""

    @property
    def page_len(self) -> int:
        """Tokens of a page."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""

    def bind(self, pages: Tensor) -> CodecPages:
        """Access to the pages of one layer. pages: uint8 [N, page_bytes], contiguous; never copied."""


def make_codec(name: str, dtype: torch.dtype, num_kv_heads: int, head_dim: int, page_len: int) -> Codec:
    """The codec `name` of core.formats.KV_FORMATS, which decodes into `dtype`.

    Raises UsageError where the heads do not suit it.
    """
    if name in COMPUTE_DTYPES:
        stored = next(t for t, n in _NAMES.items() if n == name)
        return PlainCodec(stored, num_kv_heads, head_dim, page_len, dtype)
    if name == "fp8":
        return Fp8Codec(dtype, num_kv_heads, head_dim, page_len)
    check_kv_heads(name, head_dim)
    return GroupCodec(name, dtype, num_kv_heads, head_dim, page_len)


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] times the Hadamard matrix of size D / sqrt(D), in x's type: orthonormal, its own inverse.

    D is a power of two. Sums and differences in fp32, neighbours first, so that a row's bits depend on that
    row alone.
    """
    dim = x.shape[-1]
    y, width = x.float(), 1
    while width < dim:
        left, right = y.reshape(*x.shape[:-1], dim // (2 * width), 2, width).unbind(-2)
        y = torch.stack((left + right, left - right), dim=-2)
        width *= 2
    return (y.reshape(x.shape) * dim**-0.5).to(x.dtype)


class _Layout:
    """What follows from a codec's name and shape: see Codec."""

    @property
    def format(self: Codec) -> KvFormat:
        return KV_FORMATS[self.name]

    @property
    def page_bytes(self: Codec) -> int:
        return self.page_len * kv_token_bytes(self.name, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class PlainCodec(_Layout):
    """K and V in a compute type. A page is [page_len, 2, Hkv, D]: token after token, K before V.

    Pages with consecutive ids therefore hold their tokens at one constant stride, and are read as one view
    without a copy. read_dtype: what they are read as; None: as stored.
    """

    dtype: torch.dtype
    num_kv_heads: int
    head_dim: int
    page_len: int
    read_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        assert self.dtype in _NAMES, f"{self.dtype} is no compute type"

    @property
    def name(self) -> str:
        """The compute type's name: fp32, bf16 or fp16."""
        return _NAMES[self.dtype]

    def bind(self, pages: Tensor) -> PlainPages:
        """See Codec."""
        assert pages.shape[1] == self.page_bytes and pages.is_contiguous()
        return PlainPages(self, pages)


class PlainPages:
    """`CodecPages` of `PlainCodec`. What is read from gathered pages has the strides of the pool."""

    __slots__ = ("_k", "_page_len", "_pages", "_read_dtype", "_v")

    def __init__(self, codec: PlainCodec, pages: Tensor) -> None:
        self._page_len = codec.page_len
        self._pages = pages.view(codec.dtype).view(-1, codec.page_len, 2, codec.num_kv_heads, codec.head_dim)
        self._read_dtype = codec.read_dtype or codec.dtype
        rows = self._pages.flatten(0, 1)
        self._k, self._v = rows[:, 0], rows[:, 1]

    def write(self, page_ids: Sequence[int], start: int, k: Tensor, v: Tensor) -> None:
        """See CodecPages."""
        length = k.shape[0]
        if isinstance(page_ids, range):
            row = page_ids.start * self._page_len + start
            self._k[row : row + length].copy_(k)
            self._v[row : row + length].copy_(v)
            return
        within = torch.arange(self._page_len, device=k.device)
        ids = torch.tensor(page_ids, device=k.device)
        rows = (ids[:, None] * self._page_len + within).flatten()[start : start + length]
        self._k.index_copy_(0, rows, k.to(self._k.dtype))
        self._v.index_copy_(0, rows, v.to(self._v.dtype))

    def read(self, page_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See CodecPages."""
        if isinstance(page_ids, range):
            row = page_ids.start * self._page_len
            k, v = self._k[row + start : row + stop], self._v[row + start : row + stop]
        else:
            first = start // self._page_len
            ids = torch.tensor(page_ids[first : ceil_div(stop, self._page_len)], device=self._pages.device)
            rows = self._pages[ids].flatten(0, 1)
            k, v = rows[start - first * self._page_len : stop - first * self._page_len].unbind(1)
        return k.to(self._read_dtype), v.to(self._read_dtype)

    @property
    def counts(self) -> dict[str, int]:
        """Nothing is counted: a value too large for fp16 is an infinity, and fails its request."""
        return {}


class _PlanePages:
    """Pages whose heads lie apart, each a few planes [page_len, width] of bytes."""

    __slots__ = ("_page_len", "_planes")

    def __init__(self, pages: Tensor, num_kv_heads: int, page_len: int, widths: Sequence[int]) -> None:
        self._page_len = page_len
        self._planes = []
        heads, at = pages.unflatten(1, (num_kv_heads, -1)), 0
        for width in widths:
            plane = heads[:, :, at : at + page_len * width]
            self._planes.append(plane.unflatten(2, (page_len, width)))
            at += page_len * width
        assert at == heads.shape[2]

    def _put(self, page_ids: Sequence[int], start: int, parts: Sequence[Tensor]) -> None:
        """parts: uint8 [T, Hkv, width] for each plane."""
        places = torch.arange(start, start + parts[0].shape[0], device=parts[0].device)
        pages, rows = places // self._page_len, places % self._page_len
        if isinstance(page_ids, range):
            pages += page_ids.start
        else:
            pages = torch.tensor(page_ids, device=pages.device)[pages]
        for plane, part in zip(self._planes, parts, strict=True):
            plane[pages, :, rows] = part

    def _get(self, page_ids: Sequence[int], start: int, stop: int) -> list[Tensor]:
        """The planes of tokens start .. stop, uint8 [stop - start, Hkv, width] each."""
        first = start // self._page_len
        part = page_ids[first : ceil_div(stop, self._page_len)]
        if isinstance(part, range):
            index: slice | Tensor = slice(part.start, part.stop)
        else:
            index = torch.tensor(part, device=self._planes[0].device)
        tokens = slice(start - first * self._page_len, stop - first * self._page_len)
        return [plane[index].transpose(1, 2).flatten(0, 1)[tokens] for plane in self._planes]


@dataclass(frozen=True)
class Fp8Codec(_Layout):
    """K and V as e4m3 at scale 1.0. A page is [Hkv, 2, page_len, D]: head after head, K before V.

    read_dtype: what they are decoded into, exactly: every e4m3 value is an fp16 and a bf16 value.
    """

    read_dtype: torch.dtype
    num_kv_heads: int
    head_dim: int
    page_len: int
    name: str = "fp8"

    def bind(self, pages: Tensor) -> Fp8Pages:
        """See Codec."""
        assert pages.shape[1] == self.page_bytes and pages.is_contiguous()
        return Fp8Pages(self, pages)


class Fp8Pages(_PlanePages):
    """`CodecPages` of `Fp8Codec`. counts: values `saturated` at 448, and `subnormal` ones below 2^-6."""

    __slots__ = ("_counts", "_read_dtype")

    def __init__(self, codec: Fp8Codec, pages: Tensor) -> None:
        super().__init__(pages, codec.num_kv_heads, codec.page_len, [codec.head_dim] * 2)
        self._read_dtype = codec.read_dtype
        self._counts = torch.zeros(2, dtype=torch.int64, device=pages.device)

    def write(self, page_ids: Sequence[int], start: int, k: Tensor, v: Tensor) -> None:
        """See CodecPages."""
        parts = []
        for x in (k, v):
            size = x.abs()
            self._counts[0] += (size > FP8_MAX).sum()
            self._counts[1] += ((size < FP8_MIN_NORMAL) & (size > 0)).sum()
            # Without the bound a cast gives NaN. A NaN stays one.
            parts.append(x.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8))
        self._put(page_ids, start, parts)

    def read(self, page_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See CodecPages."""
        k, v = self._get(page_ids, start, stop)
        return (
            k.view(torch.float8_e4m3fn).to(self._read_dtype),
            v.view(torch.float8_e4m3fn).to(self._read_dtype),
        )

    @property
    def misfits(self) -> Tensor:
        """int64 [2] on the pages' device, to which whoever writes pages adds: saturated, subnormal."""
        return self._counts

    @property
    def counts(self) -> dict[str, int]:
        """See CodecPages."""
        saturated, subnormal = self._counts.tolist()
        return {"saturated": saturated, "subnormal": subnormal}


@dataclass(frozen=True)
class GroupCodec(_Layout):
    """K and V rotated by `hadamard`, then in codes of 4 or 5 bits with an fp16 scale each 32 dims.

    A page is, head after head, K's and then V's planes, each [page_len, width]:

        codes    4 low bits of each dim; the u32 of dims 8w .. 8w + 7 has dim 8w + 2i at bit 4i and
                 dim 8w + 2i + 1 at bit 16 + 4i
        high     5-bit codes only: a u32 each 32 dims; the high bit of the dim whose low bits are at bit b of
                 the group's u32 number j is at bit b + j
        scales   fp16 each 32 dims

    A value is (code - 2^(bits - 1)) * scale. The scale is the value of greatest size over -2^(bits - 1), so
    it may be negative, and that value is met exactly but for the scale's rounding. (Gaussian groups: a fifth
    less squared error than a symmetric range.)
    """

    name: str
    read_dtype: torch.dtype
    num_kv_heads: int
    head_dim: int
    page_len: int

    def bind(self, pages: Tensor) -> GroupPages:
        """See Codec."""
        assert pages.shape[1] == self.page_bytes and pages.is_contiguous()
        return GroupPages(self, pages)


class GroupPages(_PlanePages):
    """`CodecPages` of `GroupCodec`."""

    __slots__ = ("_k_bits", "_read_dtype", "_v_bits")

    def __init__(self, codec: GroupCodec, pages: Tensor) -> None:
        form, dim = codec.format, codec.head_dim
        self._k_bits, self._v_bits, self._read_dtype = form.k_bits, form.v_bits, codec.read_dtype
        plane = {4: [dim // 2, dim // 16], 5: [dim // 2, dim // 8, dim // 16]}
        super().__init__(
            pages, codec.num_kv_heads, codec.page_len, [*plane[form.k_bits], *plane[form.v_bits]]
        )

    def write(self, page_ids: Sequence[int], start: int, k: Tensor, v: Tensor) -> None:
        """See CodecPages."""
        self._put(page_ids, start, [*_encode(k, self._k_bits), *_encode(v, self._v_bits)])

    def read(self, page_ids: Sequence[int], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See CodecPages."""
        planes = self._get(page_ids, start, stop)
        num_k = self._k_bits - 2  # 2 planes for 4 bits, 3 for 5
        k, v = _decode(planes[:num_k]), _decode(planes[num_k:])
        return k.to(self._read_dtype), v.to(self._read_dtype)

    @property
    def counts(self) -> dict[str, int]:
        """Nothing is counted: scales follow the values."""
        return {}


def _encode(x: Tensor, bits: int) -> list[Tensor]:
    """The planes of x [T, Hkv, D], uint8 [T, Hkv, width] each."""
    half = 1 << (bits - 1)
    groups = hadamard(x.float()).unflatten(-1, (-1, 32))
    high, low = groups.amax(-1), groups.amin(-1)
    extreme = torch.where(high >= -low, high, low)
    # fp16's own bounds: an infinite scale would make every small value NaN.
    scale = (extreme / -half).clamp(-65504.0, 65504.0).half()
    codes = groups / scale.float()[..., None]
    codes = codes.nan_to_num(0.0).round().clamp(-half, half - 1).add(half).to(torch.uint8)
    words = codes.unflatten(-1, (4, 4, 2)).transpose(-1, -2).flatten(-2)  # [.., groups, j, i]
    nibbles = words & 15
    planes = [(nibbles[..., ::2] | nibbles[..., 1::2] << 4).flatten(-3)]
    if bits == 5:
        spread = (words >> 4).transpose(-1, -2).reshape(*words.shape[:-2], 4, 8)
        powers = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=x.device)
        planes.append((spread * powers).sum(-1, dtype=torch.uint8).flatten(-2))
    planes.append(scale.view(torch.uint8))
    return planes


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """What each byte of a word of codes adds to its 8 dims, fp32 [4 * 256, 8], and each byte of a group's high bits
    to its 32 dims, [4 * 256, 32]. Looked up and added up they are exact, and faster than moving bits about."""
    byte = torch.arange(256)
    low, high = torch.zeros(4, 256, 8), torch.zeros(4, 256, 4, 8)
    for k in range(4):
        for half in range(2):
            i = 2 * k + half
            dim = 2 * (i % 4) + i // 4
            low[k, :, dim] = (byte >> 4 * half & 15).float()
            for j in range(4):
                high[k, :, j, dim] = 16.0 * (byte >> (4 * half + j) & 1)
    return low.flatten(0, 1).to(device), high.flatten(2).flatten(0, 1).to(device)


def _look_up(table: Tensor, plane: Tensor) -> Tensor:
    """The sums of `table` over each four bytes of a plane [..., 4 n]: [..., n * table width]."""
    places = plane.unflatten(-1, (-1, 4)) + 256 * torch.arange(4, dtype=torch.int32, device=plane.device)
    summed = embedding_bag(places.reshape(-1, 4), table, mode="sum")
    return summed.view(*plane.shape[:-1], plane.shape[-1] // 4 * table.shape[1])


def _decode(planes: Sequence[Tensor]) -> Tensor:
    """Values [S, Hkv, D] fp32, still rotated, of the planes of K or of V."""
    low, high = _tables(planes[0].device)
    codes = _look_up(low, planes[0])
    if len(planes) == 3:
        codes += _look_up(high, planes[1])
    codes -= 8 if len(planes) == 2 else 16
    scale = planes[-1].contiguous().view(torch.float16).float()
    return codes.unflatten(-1, (-1, 32)).mul_(scale[..., None]).flatten(-2)
