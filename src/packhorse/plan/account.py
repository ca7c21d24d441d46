"""Bytes of what the engine allocates, as formulas over a model's facts; the engine allocates by them too.

codec: how K and V are stored, a compute type (`core.formats.COMPUTE_DTYPES`).
"""

from __future__ import annotations

from packhorse.core import cost, formats
from packhorse.facts.model import ModelFacts
from packhorse.facts.weights import param_groups


def kv_token_bytes(facts: ModelFacts, codec: str) -> int:
    """K and V of one token in all full-attention layers."""
    return facts.num_full_layers * formats.kv_token_bytes(codec, facts.num_kv_heads, facts.head_dim)


def kv_page_bytes(facts: ModelFacts, codec: str, page_len: int) -> int:
    """One page: K and V of `page_len` tokens of one layer."""
    return page_len * formats.kv_token_bytes(codec, facts.num_kv_heads, facts.head_dim)


def snapshot_bytes(facts: ModelFacts, codec: str) -> int:
    """Recurrent state of all linear layers at one position: the convolution's inputs in the compute type, the
    delta rule's state in fp32. 0 for a model without such layers."""
    delta = facts.delta
    if delta is None:
        return 0
    value_bytes = formats.COMPUTE_DTYPES[codec].block_bytes
    conv = cost.conv_state_bytes(delta.conv_dim, delta.conv_kernel, value_bytes)
    state = cost.recurrent_state_bytes(delta.num_v_heads, delta.k_head_dim, delta.v_head_dim)
    return facts.num_linear_layers * (conv + state)


def weight_bytes(facts: ModelFacts, dtype: str) -> int:
    """All weights of the text model in the compute type `dtype`; norms, routers, convolutions and decay
    parameters are fp32 always."""
    compute, full = formats.COMPUTE_DTYPES[dtype], formats.COMPUTE_DTYPES["fp32"]
    return sum((full if group.fp32 else compute).num_bytes(group.num_values) for group in param_groups(facts))
