"""The parity bound proves something: each of these faults breaks it.

Every fault is planted in a model or a kernel that passes without it; the prompt goes through the engine in
chunks, is read to 128, resumed from there, and its last logits are compared as in test_parity.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import oracle
from engines import ask, load_folder, make_engine
from packhorse.core.protocols import Segment
from packhorse.kernels import dispatch
from packhorse.kernels.attention import flash, ref
from packhorse.kernels.rope.ref import frequencies
from packhorse.layers import delta_net, mlp
from packhorse.models.model import Model
from packhorse.store import kv

PROMPT_LEN = 300
Patch = pytest.MonkeyPatch


def error_of(model: Model, family: str) -> float:
    """Error of the last logits, read in chunks and resumed from a prefix of 128 tokens, over its bound."""
    reference, _ = oracle.shared_checkpoint(family)
    ids = oracle.random_ids(PROMPT_LEN)
    want = oracle.oracle_logits(reference, ids)[-1]
    engine = make_engine(model, chunk_len=64)
    ask(engine, ids[:129], name="before")
    _, event = ask(engine, ids)
    assert event.usage.cached_len == 128
    got = engine.runner.logits["r", PROMPT_LEN - 1]
    if model.dtype in oracle.BOUNDS_16_BIT:
        return oracle.rms_error(got, want) / oracle.BOUNDS_16_BIT[model.dtype]
    return oracle.relative_error(got, want) / oracle.BOUND


def layer_of(model: Model, full: bool) -> object:
    """Weights of the first layer of the kind."""
    index = next(i for i, layer in enumerate(model.layers) if layer.is_full is full)
    return model.weights.layer(index)


def state_zeroed(model: Model, patch: Patch) -> None:
    real = dispatch.delta_rule
    patch.setattr(dispatch, "delta_rule", lambda *a: real(*a[:-1], a[-1].zero_()))


def conv_state_zeroed(model: Model, patch: Patch) -> None:
    real = dispatch.causal_conv
    patch.setattr(dispatch, "causal_conv", lambda x, w, state: real(x, w, state.zero_()))


def snapshot_not_restored(model: Model, patch: Patch) -> None:
    """KV comes from the prefix, the recurrent state starts anew."""
    patch.setattr(kv.KVStore, "_restore", lambda self, tip, slot: kv.zero_state(self._tier, slot))


def page_dropped(model: Model, patch: Patch) -> None:
    """Positions 64 .. 128 of every later read are zeros."""
    real = kv.PagesView.segments

    def segments(self, span, stop):
        for start, k, v in real(self, span, stop):
            k, v = k.clone(), v.clone()
            k[64 - start : 128 - start] = 0
            v[64 - start : 128 - start] = 0
            yield Segment(start, k, v)

    patch.setattr(kv.PagesView, "segments", segments)


def pages_swapped(model: Model, patch: Patch) -> None:
    real = kv.PagesView.segments

    def segments(self, span, stop):
        for start, k, v in real(self, span, stop):
            order = torch.arange(k.shape[0])
            if k.shape[0] >= 128:
                order[:128] = order[:128].roll(64)
            yield Segment(start, k[order], v[order])

    patch.setattr(kv.PagesView, "segments", segments)


def experts_swapped(model: Model, patch: Patch) -> None:
    experts = model.weights.layer(0).mlp.experts
    experts.down_proj[:] = experts.down_proj.roll(1, 0)


def router_not_normalised(model: Model, patch: Patch) -> None:
    real = mlp.route
    patch.setattr(mlp, "route", lambda logits, top_k, norm: real(logits, top_k, False))


def shared_expert_dropped(model: Model, patch: Patch) -> None:
    model.weights.layer(0).mlp.shared_expert.down_proj.weight.zero_()


def biases_dropped(model: Model, patch: Patch) -> None:
    for layer in range(model.facts.num_layers):
        model.weights.layer(layer).self_attn.qkv_proj.bias.zero_()


def output_bias_dropped(model: Model, patch: Patch) -> None:
    model.weights.layer(0).self_attn.o_proj.bias.zero_()


def mlp_bias_dropped(model: Model, patch: Patch) -> None:
    model.weights.layer(0).mlp.down_proj.bias.zero_()


def qk_norm_dropped(model: Model, patch: Patch) -> None:
    attention = layer_of(model, full=True).self_attn
    attention.q_norm.fill_(1.0)
    attention.k_norm.fill_(1.0)


def rope_off_by_2_percent(model: Model, patch: Patch) -> None:
    next(layer for layer in model.layers if layer.is_full).mixer.rope.inv_freq.mul_(1.02)


def rope_factor_dropped(model: Model, patch: Patch) -> None:
    """Cos and sin are not scaled."""
    next(layer for layer in model.layers if layer.is_full).mixer.rope.factor = 1.0


def yarn_as_default(model: Model, patch: Patch) -> None:
    """The frequencies of the original window, with YaRN's scale of cos and sin."""
    rope = next(layer for layer in model.layers if layer.is_full).mixer.rope
    rope.inv_freq = frequencies(replace(model.facts.rope, kind="default"))[0]


def gate_dropped(model: Model, patch: Patch) -> None:
    """A sigmoid of 0 is a gate of one half everywhere."""
    f = model.facts
    rows = slice(f.num_heads * f.head_dim, 2 * f.num_heads * f.head_dim)
    layer_of(model, full=True).self_attn.qkv_proj.weight[rows] = 0


def norm_offset_forgotten(model: Model, patch: Patch) -> None:
    layer_of(model, full=True).input_layernorm.sub_(1.0)


def value_heads_tiled(model: Model, patch: Patch) -> None:
    """Key head h serves value heads h, h + n, ... in place of h r .. h r + r - 1."""
    real = delta_net.DeltaNet._heads

    def heads(self, conv):
        q, k, v = real(self, conv)
        d = self.delta
        order = torch.arange(d.num_v_heads).view(d.num_k_heads, -1).t().reshape(-1)
        return q[:, order], k[:, order], v

    patch.setattr(delta_net.DeltaNet, "_heads", heads)


def beta_dropped(model: Model, patch: Patch) -> None:
    real = dispatch.delta_rule
    patch.setattr(dispatch, "delta_rule", lambda q, k, v, g, b, s: real(q, k, v, g, torch.ones_like(b), s))


def last_key_hidden(model: Model, patch: Patch) -> None:
    """The causal mask is off by one for the past: the newest stored key is not seen."""
    real = flash._flash

    def narrow(q, k, v, causal, scale):
        if not causal and k.shape[2] > 1:
            k, v = k[:, :, :-1], v[:, :, :-1]
        return real(q, k, v, causal, scale)

    patch.setattr(flash, "_flash", narrow)


def segments_averaged(model: Model, patch: Patch) -> None:
    """Merged without their log-sum-exp."""
    real = ref.Merger.add
    patch.setattr(ref.Merger, "add", lambda self, out, lse: real(self, out, torch.zeros_like(lse)))


def state_not_folded(model: Model, patch: Patch) -> None:
    """Exact mode: a whole page leaves the recurrent state as it was."""
    real = delta_net.delta_chunk
    patch.setattr(delta_net, "delta_chunk", lambda *a: (real(*a)[0], a[-1].clone()))


def own_key_hidden(model: Model, patch: Patch) -> None:
    """Exact mode: each query sees one key too few."""
    real = ref._attend
    patch.setattr(ref, "_attend", lambda q, k, v, keys, at, scale: real(q, k, v, keys, at - 1, scale))


def residual_16_bit(model: Model, patch: Patch) -> None:
    """The residual stream in bf16 after every layer: a fault of precision, not of logic."""

    def rounded(layer):
        return lambda *args: layer(*args).bfloat16().float()

    patch.setattr(model, "layers", [rounded(layer) for layer in model.layers])


Fault = Callable[[Model, Patch], None]
FAULTS: list[tuple[Fault, str]] = [
    (state_zeroed, "qwen3_5"),
    (conv_state_zeroed, "qwen3_5"),
    (snapshot_not_restored, "qwen3_5_moe"),
    (page_dropped, "llama"),
    (page_dropped, "qwen3_next"),
    (pages_swapped, "qwen3"),
    (experts_swapped, "qwen3_moe"),
    (router_not_normalised, "qwen3_moe"),
    (shared_expert_dropped, "qwen3_5_moe"),
    (biases_dropped, "qwen2"),
    (qk_norm_dropped, "qwen3"),
    (qk_norm_dropped, "qwen3_5"),
    (rope_off_by_2_percent, "llama"),
    (rope_off_by_2_percent, "qwen3_5"),
    (gate_dropped, "qwen3_5"),
    (norm_offset_forgotten, "qwen3_5"),
    (value_heads_tiled, "qwen3_next"),
    (beta_dropped, "qwen3_5"),
    (last_key_hidden, "qwen2"),
    (segments_averaged, "llama"),
    (residual_16_bit, "qwen3"),
    (rope_factor_dropped, "qwen3-yarn"),
    (rope_factor_dropped, "qwen3-yarn-factor"),
    (rope_factor_dropped, "qwen3_5-yarn"),
    (yarn_as_default, "qwen3-yarn"),
    (yarn_as_default, "qwen3_5-yarn"),
    (biases_dropped, "llama-attention-bias"),
    (output_bias_dropped, "llama-attention-bias"),
    (mlp_bias_dropped, "llama-mlp-bias"),
]
EXACT_FAULTS: list[tuple[Fault, str]] = [
    (state_not_folded, "qwen3_5"),
    (own_key_hidden, "llama"),
    (experts_swapped, "qwen3_moe"),
]
FAULTS_16_BIT: list[tuple[Fault, str]] = [
    (rope_off_by_2_percent, "llama"),
    (qk_norm_dropped, "qwen3"),
    (conv_state_zeroed, "qwen3_5"),
]


def name_of(value: object) -> str:
    return value if isinstance(value, str) else value.__name__


def check(fault: Fault, model: Model, family: str, patch: Patch) -> None:
    """Within the bound of the model's dtype without the fault, beyond it with."""
    assert error_of(model, family) < 1
    with torch.inference_mode():
        fault(model, patch)
    assert error_of(model, family) > 1


@pytest.mark.parametrize(("fault", "family"), FAULTS, ids=name_of)
def test_fault_breaks_the_bound(fault, family, monkeypatch):
    check(fault, load_folder(oracle.shared_checkpoint(family)[1]), family, monkeypatch)


@pytest.mark.parametrize(("fault", "family"), EXACT_FAULTS, ids=name_of)
def test_fault_breaks_the_bound_in_exact_mode(fault, family, monkeypatch):
    check(fault, load_folder(oracle.shared_checkpoint(family)[1], exact=True), family, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("fault", "family"), FAULTS_16_BIT, ids=name_of)
def test_fault_breaks_the_bound_of_16_bit(fault, family, dtype, monkeypatch):
    check(fault, load_folder(oracle.shared_checkpoint(family)[1], dtype=dtype), family, monkeypatch)
