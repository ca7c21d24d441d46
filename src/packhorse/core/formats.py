"""The only table of bits: how many bytes values take in each storage format.

A format stores `block_len` values in `block_bytes` bytes. Sources: the safetensors dtype names; the GGUF
block structures (type numbers as in the GGUF specification).
"""

from __future__ import annotations

from dataclasses import dataclass

from packhorse.core.units import ceil_div


@dataclass(frozen=True)
class Format:
    """How values are stored. `gguf_type` is the type number in a GGUF header, if it has one."""

    name: str
    block_len: int
    block_bytes: int
    gguf_type: int | None = None

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
    Format("Q4_0", 32, 18, 2),
    Format("Q4_1", 32, 20, 3),
    Format("Q5_0", 32, 22, 6),
    Format("Q5_1", 32, 24, 7),
    Format("Q8_0", 32, 34, 8),
    Format("Q2_K", 256, 84, 10),
    Format("Q3_K", 256, 110, 11),
    Format("Q4_K", 256, 144, 12),
    Format("Q5_K", 256, 176, 13),
    Format("Q6_K", 256, 210, 14),
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


def kv_token_bytes(codec: str, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of K and V of one token of one layer in `codec` (only the compute types are built yet)."""
    return COMPUTE_DTYPES[codec].num_bytes(2 * num_kv_heads * head_dim)
