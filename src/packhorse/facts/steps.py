"""What models decode steps on a card have kernels for."""

from __future__ import annotations

from packhorse.core.formats import TILE_COLS
from packhorse.facts.model import ModelFacts

DELTA_HEAD_DIMS = (32, 64, 128)
MAX_HIDDEN = 8192
MAX_EXPERTS, MAX_TOP_K = 512, 10
MAX_SEQUENCES = 16
"""Of which each has a token in a captured step."""


def step_misfit(facts: ModelFacts, dtype: str) -> str | None:
    """Why a model's layers have no step kernels in a compute type, in words; None where they have."""
    if dtype not in ("fp16", "bf16"):
        return f"it computes in {dtype}"
    d, moe = facts.delta, facts.moe
    if d is not None and (d.k_head_dim != d.v_head_dim or d.k_head_dim not in DELTA_HEAD_DIMS):
        return f"its delta-net heads have {d.k_head_dim} and {d.v_head_dim} dims"
    if facts.hidden_size % 8 or facts.hidden_size > MAX_HIDDEN:
        return f"its hidden size is {facts.hidden_size}"
    if moe is not None and (moe.num_experts > MAX_EXPERTS or moe.top_k > MAX_TOP_K):
        return f"it routes {moe.top_k} of {moe.num_experts} experts"
    if moe is not None and (facts.hidden_size % TILE_COLS or moe.expert_dim % TILE_COLS):
        return f"its experts have {facts.hidden_size} and {moe.expert_dim} dims, no multiples of {TILE_COLS}"
    return None
