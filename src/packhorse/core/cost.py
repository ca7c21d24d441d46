"""Floating-point operations and bytes of each operation, as formulas over shapes.

A multiply-add counts as two operations. `plan` predicts with these and benchmarks report against them.
"""

from __future__ import annotations


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
