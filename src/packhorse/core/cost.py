"""Floating-point operations and bytes of each operation, as formulas over shapes.

A multiply-add counts as two operations. `plan` predicts with these and benchmarks report against them.
"""

from __future__ import annotations

DELTA_SPAN_LEN = 2048
"""Tokens for which the delta rule's scratch exists at once on a card."""
UNPACK_BYTES = 256 << 20
"""Values of packed weights that exist at once on a card, for products of many rows."""
CPU_UNPACK_BYTES = 16 << 20
"""Codes, scales and values of a slice of packed weights that is multiplied on a CPU."""


def linear_flops(tokens: int, in_dim: int, out_dim: int) -> int:
    """Dense product [tokens, in] x [in, out]."""
    return 2 * tokens * in_dim * out_dim


def attention_flops(queries: int, keys: int, num_heads: int, head_dim: int) -> int:
    """QK^T and PV of `queries` rows, each over `keys` positions (an average where causal)."""
    return 4 * queries * keys * num_heads * head_dim


def causal_attention_flops(start: int, length: int, num_heads: int, head_dim: int) -> int:
    """Causal attention of positions start .. start + length over everything before and themselves."""
    pairs = length * start + length * (length + 1) // 2
    return 4 * pairs * num_heads * head_dim


def delta_rule_flops(tokens: int, num_v_heads: int, k_dim: int, v_dim: int, chunk_len: int = 64) -> int:
    """Gated delta rule in chunks: state read, update and output, and the in-chunk products."""
    per_token = 6 * k_dim * v_dim + 3 * 2 * chunk_len * k_dim + 2 * chunk_len * v_dim
    return tokens * num_v_heads * per_token


def conv_flops(tokens: int, channels: int, kernel: int) -> int:
    """Depthwise causal convolution."""
    return 2 * tokens * channels * kernel


def recurrent_state_bytes(num_v_heads: int, k_dim: int, v_dim: int) -> int:
    """fp32 delta-rule state of one layer of one sequence."""
    return 4 * num_v_heads * k_dim * v_dim


def conv_state_bytes(channels: int, kernel: int, value_bytes: int) -> int:
    """Inputs the causal convolution of one layer still needs: kernel - 1 columns."""
    return channels * (kernel - 1) * value_bytes


def delta_scratch_floats(k_dim: int, v_dim: int, chunk_len: int = 64) -> int:
    """fp32 values that the delta rule's kernels pass on for one chunk of one value head: three matrices of keys and
    queries, one of values, one of the chunk with itself, and a decay on a line of its own."""
    return chunk_len * (3 * k_dim + chunk_len + v_dim) + 32


def attention_split_floats(num_heads: int, head_dim: int, num_splits: int = 256) -> int:
    """fp32 values of the partial results of one query token over all splits of its keys: output, maximum, sum."""
    return num_heads * num_splits * (head_dim + 2)
