"""The only table of bits: how many bytes values take in each storage format.

A format stores `block_len` values in `block_bytes` bytes. Sources: the safetensors dtype names; the GGUF
block structures (type numbers as in the GGUF specification). Packed formats are those that kernels compute on.
"""

from __future__ import annotations

from dataclasses import dataclass

from packhorse.core.errors import UsageError
from packhorse.core.units import ceil_div


@dataclass(frozen=True)
class Format:
    """How values are stored. `gguf_type` is the type number in a GGUF header, if it has one. `packed` names the
    packed format that holds the same codes and scales, if there is one."""

    name: str
    block_len: int
    block_bytes: int
    gguf_type: int | None = None
    packed: str | None = None

    @property
    def bits(self) -> float:
        """Bits a value."""
        return 8 * self.block_bytes / self.block_len

    def num_bytes(self, num_values: int) -> int:
        """Bytes of `num_values` values; a last part of a block counts whole."""
        return ceil_div(num_values, self.block_len) * self.block_bytes


_PLAIN = [
    Format("F64", 1, 8, 28),
    Format("F32", 1, 4, 0),
    Format("F16", 1, 2, 1),
    Format("BF16", 1, 2, 30),
    Format("F8_E4M3", 1, 1),
    Format("F8_E5M2", 1, 1),
    Format("I64", 1, 8, 27),
    Format("I32", 1, 4, 26),
    Format("I16", 1, 2, 25),
    Format("I8", 1, 1, 24),
    Format("U64", 1, 8),
    Format("U32", 1, 4),
    Format("U16", 1, 2),
    Format("U8", 1, 1),
    Format("BOOL", 1, 1),
]
_GGUF_BLOCKS = [
    Format("Q4_0", 32, 18, 2, "int4-g32"),
    Format("Q4_1", 32, 20, 3, "int4m-g32"),
    Format("Q5_0", 32, 22, 6, "int5-g32"),
    Format("Q5_1", 32, 24, 7, "int5m-g32"),
    Format("Q8_0", 32, 34, 8, "int8-g32"),
    Format("Q2_K", 256, 84, 10),
    Format("Q3_K", 256, 110, 11),
    Format("Q4_K", 256, 144, 12, "q4_k"),
    Format("Q5_K", 256, 176, 13, "q5_k"),
    Format("Q6_K", 256, 210, 14, "q6_k"),
    Format("Q8_K", 256, 292, 15),
]

FORMATS: dict[str, Format] = {f.name: f for f in [*_PLAIN, *_GGUF_BLOCKS]}
GGUF_TYPES: dict[int, Format] = {f.gguf_type: f for f in FORMATS.values() if f.gguf_type is not None}

# Types that other engines write and this one does not read: named so that a refusal can name them.
GGUF_UNSUPPORTED: dict[int, str] = {
    9: "Q8_1", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

COMPUTE_DTYPES: dict[str, Format] = {"fp32": FORMATS["F32"], "bf16": FORMATS["BF16"], "fp16": FORMATS["F16"]}

TILE_ROWS = 16
TILE_COLS = 64
LINE_BYTES = 128


@dataclass(frozen=True)
class PackedFormat:
    """How a matrix [N, K] of few-bit codes is laid out for the kernels; the whole picture: docs/formats.md.

    16 rows make a row block: a run of column blocks, each a header of whole 128-byte lines and its tiles of
    16 x 64 codes. N is padded to 16 and K to 64, with values of 0.

    kind says what a code q of a group of `group_len` columns means:
    symmetric (q - 2^(bits-1)) * scale; zero (q - zero) * scale; min q * scale + min; fp8 e4m3(q) * scale;
    k d * sc * q - dmin * m; q6_k d * sc * (q - 32).
    """

    name: str
    bits: int
    group_len: int
    kind: str
    block_cols: int
    header_bytes: int

    @property
    def tile_bytes(self) -> int:
        """Bytes of 16 x 64 codes: a plane of 4 bits and one of the rest, or bytes."""
        return TILE_ROWS * TILE_COLS * self.bits // 8

    @property
    def block_tiles(self) -> int:
        """Tiles of a whole column block."""
        return self.block_cols // TILE_COLS

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole column block, header and tiles."""
        return self.header_bytes + self.block_tiles * self.tile_bytes

    def num_row_blocks(self, num_rows: int) -> int:
        """Row blocks of a matrix with `num_rows` rows."""
        return ceil_div(num_rows, TILE_ROWS)

    def row_bytes(self, num_cols: int) -> int:
        """Bytes of one row block. A last column block has its whole header and only the tiles there are."""
        tiles = ceil_div(num_cols, TILE_COLS)
        return ceil_div(tiles, self.block_tiles) * self.header_bytes + tiles * self.tile_bytes

    def num_bytes(self, num_rows: int, num_cols: int) -> int:
        """Bytes of a matrix [num_rows, num_cols]."""
        return self.num_row_blocks(num_rows) * self.row_bytes(num_cols)

    def has_int4_product(self, num_rows: int, num_cols: int) -> bool:
        """Whether torch's int4 product of the CPU can hold such a matrix: 4 bits in groups of 32 to 128."""
        whole = num_cols % self.group_len == 0 and num_rows % TILE_ROWS == 0
        return self.bits == 4 and self.group_len in (32, 64, 128) and whole

    def int4_bytes(self, num_rows: int, num_cols: int) -> int:
        """Bytes that it takes for it: codes, and two bf16 numbers a group."""
        return num_rows * (num_cols // 2 + 4 * (num_cols // self.group_len))

    def fits(self, num_cols: int) -> bool:
        """Whether a matrix with K = num_cols can be packed. K-quants fill whole blocks of 256. Padded columns of
        a format with zeros or minima must not share a group with real ones: there they could not mean 0."""
        if self.kind in ("k", "q6_k"):
            return num_cols % self.block_cols == 0
        whole = num_cols % TILE_COLS == 0 or num_cols % self.group_len == 0
        return whole or self.kind in ("symmetric", "fp8")


def _packed_formats() -> list[PackedFormat]:
    kinds = (("", "symmetric", 1), ("z", "zero", 2), ("m", "min", 2))
    groups = [
        PackedFormat(f"int{bits}{letter}-g{group}", bits, group, kind, 4 * group, lines * LINE_BYTES)
        for bits in (4, 5, 6, 8)
        for letter, kind, lines in kinds
        for group in (16, 32, 64, 128)
    ]
    return [
        *groups,
        PackedFormat("fp8-g128", 8, 128, "fp8", 512, 2 * LINE_BYTES),
        PackedFormat("q4_k", 4, 32, "k", 256, 2 * LINE_BYTES),
        PackedFormat("q5_k", 5, 32, "k", 256, 2 * LINE_BYTES),
        PackedFormat("q6_k", 6, 16, "q6_k", 256, 3 * LINE_BYTES),
    ]


PACKED: dict[str, PackedFormat] = {form.name: form for form in _packed_formats()}


KV_CODECS = (*COMPUTE_DTYPES, "fp8", "k5v4", "k4v4")
KV_GROUP_LEN = 32
"""Values of k5v4 and k4v4 that share an fp16 scale."""


@dataclass(frozen=True)
class KvFormat:
    """How K and V of a token are stored; `quant.codec` holds the layouts.

    id goes with every page that leaves memory, and version changes whenever its bytes come to mean something
    else. k_bits, v_bits: bits of a value. group_len: values along a head that share an fp16 scale, 0 where
    there is none; those codecs rotate each head by a Hadamard matrix first.
    """

    id: int
    k_bits: int
    v_bits: int
    group_len: int = 0
    version: int = 1

    @property
    def rotated(self) -> bool:
        """Whether values are stored in the basis of the Hadamard matrix."""
        return self.group_len > 0


KV_FORMATS: dict[str, KvFormat] = {
    "fp32": KvFormat(0, 32, 32),
    "fp16": KvFormat(1, 16, 16),
    "bf16": KvFormat(2, 16, 16),
    "fp8": KvFormat(3, 8, 8),
    "k5v4": KvFormat(4, 5, 4, 32),
    "k4v4": KvFormat(5, 4, 4, 32),
}


def kv_token_bytes(codec: str, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of K and V of one token of one layer in `codec`, a name of KV_FORMATS."""
    form = KV_FORMATS[codec]
    scale_bits = 2 * 16 // form.group_len if form.rotated else 0
    return num_kv_heads * head_dim * (form.k_bits + form.v_bits + scale_bits) // 8


def check_kv_heads(name: str, head_dim: int) -> None:
    """Raises UsageError where a codec cannot hold heads of `head_dim`."""
    group_len = KV_FORMATS[name].group_len
    if group_len and (head_dim % group_len or head_dim & (head_dim - 1)):
        raise UsageError(
            f"The KV codec {name} rotates heads of a power of two from {group_len} on, and this model's have "
            f"{head_dim} dims.",
            hint="Use fp8, or a 16-bit codec.",
        )
