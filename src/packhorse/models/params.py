"""What a layer's weights are made of: parameters, and the checkpoint tensors that fill them.

A parameter may be filled by several tensors (q, k and v side by side) and a checkpoint may hold it in several
forms (one tensor an expert, or all fused): `choices` lists the forms, the first whose names are all there is
taken. Shapes: H hidden, Hq, Hkv heads, D head dim, I inner size, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from packhorse.facts.model import ModelFacts

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor of `shape` and where it goes: destination[at] = tensor[order] (its rows)."""

    source: str
    shape: Shape
    at: tuple[slice | int, ...] = (slice(None),)
    order: Tensor | None = None


@dataclass(frozen=True)
class Param:
    """One weight of a layer. path: attribute path in LayerWeights; `.weight` and `.bias` make a Linear.

    fp32: kept in fp32 whatever the compute type. add: added to every value (norms stored as factor - 1).
    """

    path: str
    shape: Shape
    choices: tuple[tuple[Part, ...], ...]
    fp32: bool = False
    add: float = 0.0


def single(path: str, source: str, shape: Shape, *, fp32: bool = False, add: float = 0.0) -> Param:
    """A parameter that is one tensor of the checkpoint as it stands."""
    return Param(path, shape, ((Part(source, shape),),), fp32, add)


def stacked(path: str, sources: Iterable[tuple[str, int]], tail: Shape, *, fp32: bool = False) -> Param:
    """Tensors (name, rows) one under the other; `tail` is the rest of their shape."""
    parts, start = [], 0
    for name, rows in sources:
        parts.append(Part(name, (rows, *tail), (slice(start, start + rows),)))
        start += rows
    return Param(path, (start, *tail), (tuple(parts),), fp32)


def attention_params(facts: ModelFacts, prefix: str) -> list[Param]:
    """Weights of layers.attention.Attention from `prefix`self_attn."""
    name = f"{prefix}self_attn."
    dim, hidden = facts.head_dim, facts.hidden_size
    num_q, num_kv = facts.num_heads * dim, facts.num_kv_heads * dim
    gated = 2 if facts.attn_gate else 1
    order = None
    if facts.attn_gate:
        # The checkpoint has a head's query rows, then its gate rows; here all queries come first.
        order = torch.arange(2 * num_q).view(facts.num_heads, 2, dim).transpose(0, 1).reshape(-1)

    def qkv(suffix: str, tail: Shape) -> Param:
        k_row = gated * num_q
        parts = (
            Part(f"{name}q_proj.{suffix}", (k_row, *tail), (slice(0, k_row),), order),
            Part(f"{name}k_proj.{suffix}", (num_kv, *tail), (slice(k_row, k_row + num_kv),)),
            Part(f"{name}v_proj.{suffix}", (num_kv, *tail), (slice(k_row + num_kv, k_row + 2 * num_kv),)),
        )
        return Param(f"self_attn.qkv_proj.{suffix}", (k_row + 2 * num_kv, *tail), (parts,))

    params = [
        qkv("weight", (hidden,)),
        single("self_attn.o_proj.weight", f"{name}o_proj.weight", (hidden, num_q)),
    ]
    if facts.qkv_bias:
        params.append(qkv("bias", ()))
    if facts.o_bias:
        params.append(single("self_attn.o_proj.bias", f"{name}o_proj.bias", (hidden,)))
    if facts.qk_norm:
        params += [
            norm_param(facts, f"self_attn.{n}", f"{name}{n}.weight", dim) for n in ("q_norm", "k_norm")
        ]
    return params


def norm_param(facts: ModelFacts, path: str, source: str, dim: int) -> Param:
    """A norm's factor, with the family's offset folded in."""
    return single(path, source, (dim,), fp32=True, add=1.0 if facts.norm_offset else 0.0)


def mlp_params(facts: ModelFacts, prefix: str, path: str, inner: int) -> list[Param]:
    """Weights of layers.mlp.Mlp under `path` from `prefix`{gate,up,down}_proj."""
    hidden = facts.hidden_size
    names = [(f"{prefix}gate_proj", inner), (f"{prefix}up_proj", inner)]
    params = [
        stacked(f"{path}.gate_up_proj.weight", [(f"{n}.weight", r) for n, r in names], (hidden,)),
        single(f"{path}.down_proj.weight", f"{prefix}down_proj.weight", (hidden, inner)),
    ]
    if facts.mlp_bias:
        params += [
            stacked(f"{path}.gate_up_proj.bias", [(f"{n}.bias", r) for n, r in names], ()),
            single(f"{path}.down_proj.bias", f"{prefix}down_proj.bias", (hidden,)),
        ]
    return params


def moe_params(facts: ModelFacts, prefix: str) -> list[Param]:
    """Weights of layers.mlp.Moe from `prefix`mlp; experts fused or one tensor each."""
    moe, hidden = facts.moe, facts.hidden_size
    assert moe is not None
    name, inner, num = f"{prefix}mlp.", moe.expert_dim, moe.num_experts
    up_rows = slice(inner, 2 * inner)
    gate_up = tuple(
        Part(f"{name}experts.{e}.{proj}.weight", (inner, hidden), (e, rows))
        for e in range(num)
        for proj, rows in (("gate_proj", slice(0, inner)), ("up_proj", up_rows))
    )
    down = tuple(Part(f"{name}experts.{e}.down_proj.weight", (hidden, inner), (e,)) for e in range(num))
    gate_up_shape, down_shape = (num, 2 * inner, hidden), (num, hidden, inner)
    params = [
        single("mlp.gate.weight", f"{name}gate.weight", (num, hidden), fp32=True),
        Param(
            "mlp.experts.gate_up_proj",
            gate_up_shape,
            ((Part(f"{name}experts.gate_up_proj", gate_up_shape),), gate_up),
        ),
        Param("mlp.experts.down_proj", down_shape, ((Part(f"{name}experts.down_proj", down_shape),), down)),
    ]
    if moe.shared_dim:
        shared = f"{name}shared_expert"
        params += mlp_params(facts, f"{shared}.", "mlp.shared_expert", moe.shared_dim)
        params.append(single("mlp.shared_expert_gate.weight", f"{shared}_gate.weight", (1, hidden)))
    return params


def delta_common_params(facts: ModelFacts, name: str) -> list[Param]:
    """Weights of layers.delta_net.DeltaNet but its input projections, whose form differs by family."""
    d = facts.delta
    assert d is not None
    conv = Part(f"{name}conv1d.weight", (d.conv_dim, 1, d.conv_kernel))
    return [
        Param("linear_attn.conv1d", (d.conv_dim, d.conv_kernel), ((conv,),), fp32=True),
        single("linear_attn.A_log", f"{name}A_log", (d.num_v_heads,), fp32=True),
        single("linear_attn.dt_bias", f"{name}dt_bias", (d.num_v_heads,), fp32=True),
        single("linear_attn.norm", f"{name}norm.weight", (d.v_head_dim,), fp32=True),
        single("linear_attn.out_proj.weight", f"{name}out_proj.weight", (facts.hidden_size, d.value_dim)),
    ]


def layer_norm_params(facts: ModelFacts, prefix: str) -> list[Param]:
    """The two norms of a decoder layer."""
    names = ("input_layernorm", "post_attention_layernorm")
    return [norm_param(facts, n, f"{prefix}{n}.weight", facts.hidden_size) for n in names]
