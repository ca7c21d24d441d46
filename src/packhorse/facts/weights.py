"""What a model's weights are: bytes in the files by class, and values by class from the dimensions alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from packhorse.core.types import LayerKind
from packhorse.facts.gguf_model import is_mtp_block
from packhorse.facts.model import ModelFacts
from packhorse.facts.names import is_mtp, is_vision, text_name

CLASSES = (
    "embeddings", "lm_head", "attention", "delta_net", "router", "experts", "shared_expert", "mlp", "norms",
    "mtp", "vision", "other",
)  # fmt: skip

# By transformers' names, and by GGUF's; the first that matches counts. Norms inside attention and the delta
# net belong to these.
_SAFETENSORS = (
    (r"^model\.embed_tokens\.", "embeddings"),
    (r"^lm_head\.", "lm_head"),
    (r"\.self_attn\.", "attention"),
    (r"\.linear_attn\.", "delta_net"),
    (r"\.mlp\.shared_expert(_gate)?\.", "shared_expert"),
    (r"\.mlp\.experts\.", "experts"),
    (r"\.mlp\.gate\.", "router"),
    (r"\.mlp\.", "mlp"),
    (r"^model\.norm\.|layernorm\.", "norms"),
)
_GGUF = (
    (r"^token_embd\.", "embeddings"),
    (r"^output\.", "lm_head"),
    (r"\.(ssm_|attn_qkv\.|attn_gate\.)", "delta_net"),
    (r"\.attn_norm\.|\.ffn_norm\.|\.post_attention_norm\.|^output_norm\.", "norms"),
    (r"\.attn_", "attention"),
    (r"_shexp\.", "shared_expert"),
    (r"_exps\.", "experts"),
    (r"\.ffn_gate_inp\.", "router"),
    (r"\.ffn_", "mlp"),
)


class ParamGroup(NamedTuple):
    """Weights of one class that are kept in one type. fp32: whatever the compute type is. num_cols: inputs of
    each of `num_matrices` equal matrices, which may be packed; 0 for vectors and convolutions. gates: matrices of the
    delta rule's gates, few rows whose errors reach far."""

    kind: str
    num_values: int
    fp32: bool = False
    num_cols: int = 0
    num_matrices: int = 1
    gates: bool = False

    @property
    def num_rows(self) -> int:
        """Outputs of each matrix."""
        return self.num_values // (self.num_cols * self.num_matrices)


def weight_classes(facts: ModelFacts) -> dict[str, int]:
    """Bytes in the files by class, in the order of CLASSES; classes without a tensor are left out."""
    totals = dict.fromkeys(CLASSES, 0)
    for name, tensor in facts.tensors.items():
        totals[class_of(name, facts)] += tensor.num_bytes
    return {kind: total for kind, total in totals.items() if total}


def class_of(name: str, facts: ModelFacts) -> str:
    """The class, one of CLASSES, of the tensor called `name` in the model's files."""
    if facts.container == "gguf":
        if is_mtp_block(name, facts.num_layers):
            return "mtp"
        rules, known = _GGUF, name
    else:
        if is_vision(name):
            return "vision"
        if is_mtp(name):
            return "mtp"
        rules, known = _SAFETENSORS, text_name(name) or ""
    return next((kind for pattern, kind in rules if re.search(pattern, known)), "other")


def expected_params(facts: ModelFacts) -> dict[str, int]:
    """Values by class that the text model has, whatever the files hold; empty classes are left out."""
    totals = dict.fromkeys(CLASSES, 0)
    for group in param_groups(facts):
        totals[group.kind] += group.num_values
    return {kind: total for kind, total in totals.items() if total}


def body_params(facts: ModelFacts) -> int:
    """Values that one token is multiplied with, without the output head: of the experts those it is sent to."""
    total = 0
    for group in param_groups(facts):
        if group.kind == "experts":
            assert facts.moe is not None
            total += group.num_values * facts.moe.top_k // facts.moe.num_experts
        elif group.kind not in ("embeddings", "lm_head"):
            total += group.num_values
    return total


@lru_cache(maxsize=64)
def param_groups(facts: ModelFacts) -> tuple[ParamGroup, ...]:
    """The text model's weights from its dimensions. Source: the modules of transformers' classes."""
    return tuple(_groups(facts))


def _groups(facts: ModelFacts) -> Iterator[ParamGroup]:
    H = facts.hidden_size
    yield _matrix("embeddings", facts.vocab_size, H)
    if not facts.tied:
        yield _matrix("lm_head", facts.vocab_size, H)
    yield ParamGroup("norms", (2 * facts.num_layers + 1) * H, fp32=True)
    for kind, moe in zip(facts.layer_kinds, facts.moe_layers, strict=True):
        yield from _attention(facts) if kind is LayerKind.FULL else _delta(facts)
        yield from _experts(facts) if moe else _mlp(facts)


def draft_groups(facts: ModelFacts) -> Iterator[ParamGroup]:
    """One layer of multi-token prediction, class "mtp": a full-attention layer of the model's own kind, the
    product that joins embedding and hidden state, and its norms. It shares embeddings and lm_head."""
    H, moe = facts.hidden_size, facts.moe is not None
    layer = replace(facts, layer_kinds=(LayerKind.FULL,), moe_layers=(moe,))
    own = [group for group in param_groups(layer) if group.kind not in ("embeddings", "lm_head")]
    for group in [*own, _matrix("mtp", H, 2 * H), ParamGroup("mtp", 2 * H, fp32=True)]:
        yield group._replace(kind="mtp")


def _matrix(kind: str, num_rows: int, num_cols: int, num: int = 1) -> ParamGroup:
    return ParamGroup(kind, num * num_rows * num_cols, num_cols=num_cols, num_matrices=num)


def _attention(facts: ModelFacts) -> Iterator[ParamGroup]:
    H, D = facts.hidden_size, facts.head_dim
    q_rows = facts.num_heads * D * (2 if facts.attn_gate else 1)
    rows = q_rows + 2 * facts.num_kv_heads * D
    yield _matrix("attention", rows, H)
    yield _matrix("attention", H, facts.num_heads * D)
    biases = rows * facts.qkv_bias + H * facts.o_bias
    if biases:
        yield ParamGroup("attention", biases)
    if facts.qk_norm:
        yield ParamGroup("attention", 2 * D, fp32=True)


def _delta(facts: ModelFacts) -> Iterator[ParamGroup]:
    delta, H = facts.delta, facts.hidden_size
    assert delta is not None
    yield _matrix("delta_net", delta.conv_dim + delta.value_dim, H)
    yield _matrix("delta_net", 2 * delta.num_v_heads, H)._replace(gates=True)
    yield _matrix("delta_net", H, delta.value_dim)
    small = delta.conv_dim * delta.conv_kernel + 2 * delta.num_v_heads + delta.v_head_dim
    yield ParamGroup("delta_net", small, fp32=True)


def _experts(facts: ModelFacts) -> Iterator[ParamGroup]:
    moe, H = facts.moe, facts.hidden_size
    assert moe is not None
    yield ParamGroup("router", moe.num_experts * H, fp32=True)
    yield _matrix("experts", 2 * moe.expert_dim, H, moe.num_experts)
    yield _matrix("experts", H, moe.expert_dim, moe.num_experts)
    if moe.shared_dim:
        yield _matrix("shared_expert", 2 * moe.shared_dim, H)
        yield _matrix("shared_expert", H, moe.shared_dim)
        yield ParamGroup("shared_expert", H)


def _mlp(facts: ModelFacts) -> Iterator[ParamGroup]:
    H, inner = facts.hidden_size, facts.intermediate_size
    yield _matrix("mlp", 2 * inner, H)
    yield _matrix("mlp", H, inner)
    if facts.mlp_bias:
        yield ParamGroup("mlp", 2 * inner + H)
