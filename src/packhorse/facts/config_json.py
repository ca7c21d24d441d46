"""config.json of the seven families, read into the fields of ModelFacts.

Names and defaults are those of transformers' configuration classes (5.24), old spellings included. What is
not built is refused by name; a value that cannot be is refused with its field.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packhorse.core.errors import UnsupportedModelError
from packhorse.core.types import LayerKind
from packhorse.facts.fields import Fields, is_whole
from packhorse.facts.model import FAMILIES, DeltaFacts, MoeFacts, RopeFacts

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families with gated delta-net layers, query gates and norms stored as w of 1 + w."""
MOE = ("qwen3_moe", "qwen3_next", "qwen3_5_moe")
MAX_LAYERS = 4096
"""No model has more; a config that says so is damaged."""

# What transformers assumes where config.json is silent.
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"vocab": 32000, "hidden": 4096, "inner": 11008, "layers": 32, "heads": 32, "context": 2048},
    "qwen2": {
        "vocab": 151936, "hidden": 4096, "inner": 22016, "layers": 32, "heads": 32, "kv_heads": 32,
        "context": 32768,
    },
    "qwen3": {
        "vocab": 151936, "hidden": 4096, "inner": 22016, "layers": 32, "heads": 32, "kv_heads": 32,
        "head_dim": 128, "context": 32768,
    },
    "qwen3_moe": {
        "vocab": 151936, "hidden": 2048, "inner": 6144, "layers": 24, "heads": 32, "kv_heads": 4,
        "context": 32768, "experts": 128, "top_k": 8, "expert_dim": 768, "shared_dim": 0,
    },
    "qwen3_next": {
        "vocab": 151936, "hidden": 2048, "inner": 5632, "layers": 48, "heads": 16, "kv_heads": 2,
        "head_dim": 256, "context": 32768, "experts": 512, "top_k": 10, "expert_dim": 512, "shared_dim": 512,
    },
    "qwen3_5": {
        "vocab": 248320, "hidden": 4096, "inner": 12288, "layers": 32, "heads": 16, "kv_heads": 4,
        "head_dim": 256, "context": 32768,
    },
    "qwen3_5_moe": {
        "vocab": 248320, "hidden": 2048, "inner": 0, "layers": 40, "heads": 16, "kv_heads": 2,
        "head_dim": 256, "context": 32768, "experts": 256, "top_k": 8, "expert_dim": 512, "shared_dim": 512,
    },
}  # fmt: skip


def config_fields(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The fields of ModelFacts that config.json decides, as keyword arguments.

    `file` is named in errors. Raises UnsupportedModelError for what is not built and CorruptFileError for
    missing, mistyped or absurd values.
    """
    top = Fields(config, file)
    family = _family(top)
    text = top.table("text_config") or top
    _refuse_features(top, text)
    base = _DEFAULTS[family]
    num_layers = text.integer("num_hidden_layers", base["layers"], high=MAX_LAYERS)
    heads = _heads(text, family)
    context = text.integer("max_position_embeddings", base["context"])
    rope, context = _rope(text, family, heads["head_dim"], context)
    moe, moe_layers = _experts(text, family, num_layers)
    biases = family != "qwen2" and text.flag("attention_bias", False)
    dtype = text.text("dtype") or text.text("torch_dtype") or top.text("dtype") or top.text("torch_dtype")
    hybrid = family in HYBRID
    fields = {
        "family": family,
        "vocab_size": text.integer("vocab_size", base["vocab"]),
        "layer_kinds": _layer_kinds(text, family, num_layers),
        "moe_layers": moe_layers,
        "intermediate_size": text.integer("intermediate_size", base["inner"], low=int(not all(moe_layers))),
        "rms_eps": text.number("rms_norm_eps", 1e-6, low=1e-12, high=1.0),
        "rope": rope,
        "context": context,
        "tied": top.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
        "qkv_bias": biases or family == "qwen2",
        "o_bias": biases,
        "mlp_bias": family == "llama" and text.flag("mlp_bias", False),
        "qk_norm": family not in ("llama", "qwen2"),
        "attn_gate": hybrid,
        "norm_offset": hybrid,
        "delta": _delta(text) if hybrid else None,
        "moe": moe,
        "stored_dtype": dtype.removeprefix("torch.") if dtype else None,
        "num_mtp_layers": text.integer("mtp_num_hidden_layers", 0, low=0, high=MAX_LAYERS),
        "notes": ("Images and video are not read: the vision part is left out.",)
        if top.get("vision_config") is not None
        else (),
    }
    return fields | heads | _special_ids(top, text, family)


def quantization_fields(config: Mapping[str, Any], file: Path) -> Fields | None:
    """The fields of quantization_config, beside the text model's or in it; None without one."""
    top = Fields(config, file)
    for fields in (top, top.table("text_config") or top):
        for key in ("quantization_config", "compression_config"):
            quant = fields.table(key)
            if quant is not None:
                return quant
    return None


def _family(top: Fields) -> str:
    """The family that architectures and model_type name, which must agree."""
    hint = f"Packhorse runs {', '.join(ARCHITECTURES)}."
    names = top.items("architectures") or []
    model_type = top.text("model_type")
    of_type = (model_type or "").removesuffix("_text")
    if names:
        name = names[0]
        if not isinstance(name, str):
            raise top.wrong("architectures", names, "a list of class names")
        if name not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{top.file}: the architecture {name} is not supported.", hint=hint, architecture=name
            )
        if model_type is not None and of_type != ARCHITECTURES[name]:
            raise UnsupportedModelError(
                f"{top.file}: the architecture is {name} and model_type is {model_type!r}; they belong to"
                " different families.",
                hint="Correct one of them in config.json.",
                architecture=name,
                model_type=model_type,
            )
        return ARCHITECTURES[name]
    if model_type is None:
        raise top.wrong("architectures", None, "a list with a class name such as LlamaForCausalLM")
    if of_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{top.file}: model_type {model_type!r} is not supported.", hint=hint, model_type=model_type
        )
    return of_type


def _refuse_features(top: Fields, text: Fields) -> None:
    if text.get("kv_lora_rank") is not None:
        raise UnsupportedModelError(
            f"{top.file}: kv_lora_rank is {text.get('kv_lora_rank')}: multi-head latent attention is not"
            " supported.",
            hint="Choose a model with plain or grouped-query attention.",
        )
    silu = ("silu", "swish")
    for key, known, default in (
        ("hidden_act", silu, "silu"),
        ("output_gate_type", silu, "silu"),
        ("attn_output_gate", (True,), True),
    ):
        value = text.get(key)
        value = default if value is None else value
        if value not in known:
            raise UnsupportedModelError(
                f"{top.file}: {key} is {value!r}; only {known[0]!r} is supported.",
                field=key,
                value=repr(value),
            )


def _heads(text: Fields, family: str) -> dict[str, int]:
    base = _DEFAULTS[family]
    hidden = text.integer("hidden_size", base["hidden"])
    heads = text.integer("num_attention_heads", base["heads"])
    # NOTE: an explicit null means "as many as query heads"; only an absent field takes the default.
    absent_kv = base.get("kv_heads", heads) if "num_key_value_heads" not in text.values else heads
    kv_heads = text.integer("num_key_value_heads", absent_kv)
    if heads % kv_heads:
        raise text.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
    head_dim = text.maybe_integer("head_dim") or base.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise text.wrong("hidden_size", hidden, f"a multiple of num_attention_heads {heads}")
        head_dim = hidden // heads
    if head_dim % 2:
        raise text.wrong("head_dim", head_dim, "even")
    return {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _layer_kinds(text: Fields, family: str, num_layers: int) -> tuple[LayerKind, ...]:
    given = text.items("layer_types")
    # qwen3_moe has no layer_types of its own: there a window holds for all layers.
    if family == "qwen3_moe" or (family in ("qwen2", "qwen3") and given is None):
        _refuse_sliding_window(text, family, num_layers)
    if given is None:
        interval = text.integer("full_attention_interval", 4) if family in HYBRID else 1
        return tuple(
            LayerKind.LINEAR if (index + 1) % interval else LayerKind.FULL for index in range(num_layers)
        )
    if len(given) != num_layers:
        raise text.wrong("layer_types", f"{len(given)} entries", f"num_hidden_layers {num_layers} entries")
    known = list(LayerKind) if family in HYBRID else [LayerKind.FULL]
    for index, kind in enumerate(given):
        if kind not in known:
            raise UnsupportedModelError(
                f"{text.file}: layer {index} is of kind {kind!r}; {family} layers may be"
                f" {' or '.join(known)}.",
                layer=index,
                kind=repr(kind),
            )
    return tuple(LayerKind(kind) for kind in given)


def _refuse_sliding_window(text: Fields, family: str, num_layers: int) -> None:
    """Refuses a window that some layer would use; it is 4,096 where absent, and none where null."""
    window = text.maybe_integer("sliding_window") if "sliding_window" in text.values else 4096
    if window is None or not text.flag("use_sliding_window", False):
        return
    first = text.integer("max_window_layers", 28, low=0) if family != "qwen3_moe" else 0
    if first < num_layers:
        raise UnsupportedModelError(
            f"{text.file}: layers from {first} on use a sliding window of {window} tokens, which is not"
            " supported.",
            hint="Choose another model; with use_sliding_window false all layers see the whole context.",
            window=window,
        )


def _experts(text: Fields, family: str, num_layers: int) -> tuple[MoeFacts | None, tuple[bool, ...]]:
    none = (False,) * num_layers
    if family not in MOE:
        return None, none
    base = _DEFAULTS[family]
    counts = {text.maybe_integer(name, low=0) for name in ("num_experts", "num_local_experts")} - {None}
    if len(counts) > 1:
        raise text.wrong("num_local_experts", text.get("num_local_experts"), "the same as num_experts")
    num_experts = next(iter(counts), None)
    num_experts = base["experts"] if num_experts is None else num_experts
    if family == "qwen3_5_moe":
        if num_experts == 0:
            raise text.wrong("num_experts", 0, "at least 1")
        layers = (True,) * num_layers
    else:
        step = text.integer("decoder_sparse_step", 1)
        dense = text.items("mlp_only_layers") or []
        if not all(map(is_whole, dense)):
            raise text.wrong("mlp_only_layers", dense, "a list of layer numbers")
        layers = tuple(
            num_experts > 0 and index not in set(dense) and (index + 1) % step == 0
            for index in range(num_layers)
        )
    if not any(layers):
        return None, none
    top_k = text.integer("num_experts_per_tok", base["top_k"])
    if top_k > num_experts:
        raise text.wrong("num_experts_per_tok", top_k, f"at most num_experts {num_experts}")
    moe = MoeFacts(
        num_experts=num_experts,
        top_k=top_k,
        expert_dim=text.integer("moe_intermediate_size", base["expert_dim"]),
        shared_dim=0
        if family == "qwen3_moe"
        else text.integer("shared_expert_intermediate_size", base["shared_dim"], low=0),
        norm_topk=family == "qwen3_5_moe" or text.flag("norm_topk_prob", family == "qwen3_next"),
    )
    return moe, layers


def _delta(text: Fields) -> DeltaFacts:
    k_heads = text.integer("linear_num_key_heads", 16)
    v_heads = text.integer("linear_num_value_heads", 32)
    if v_heads % k_heads:
        raise text.wrong("linear_num_value_heads", v_heads, f"a multiple of linear_num_key_heads {k_heads}")
    return DeltaFacts(
        num_k_heads=k_heads,
        num_v_heads=v_heads,
        k_head_dim=text.integer("linear_key_head_dim", 128),
        v_head_dim=text.integer("linear_value_head_dim", 128),
        conv_kernel=text.integer("linear_conv_kernel_dim", 4, low=2, high=64),
    )


def _rope(text: Fields, family: str, head_dim: int, context: int) -> tuple[RopeFacts, int]:
    """RopeFacts and window from rope_parameters, or from rope_theta and rope_scaling."""
    tables = (text.table("rope_scaling"), text.table("rope_parameters"))
    raw = next((table for table in tables if table is not None and table.values), Fields({}, text.file))
    for key, value in raw.values.items():
        if isinstance(value, dict):
            raise UnsupportedModelError(
                f"{text.file}: the rope parameters differ by layer type ({key}), which is not supported."
            )
    kind = raw.text("rope_type") or raw.text("type") or "default"
    theta = raw.maybe_number("rope_theta", low=1.0) or text.number("rope_theta", 10_000.0, low=1.0)
    partial = raw.maybe_number("partial_rotary_factor", low=1e-3, high=1.0)
    if partial is None:
        partial = text.number("partial_rotary_factor", 0.25 if family in HYBRID else 1.0, low=1e-3, high=1.0)
    if partial != 1.0 and family not in HYBRID:
        # transformers' classes of these families ignore the factor for some kinds and follow it for others.
        raise UnsupportedModelError(
            f"{text.file}: partial_rotary_factor is {partial:g}; {family} rotates whole heads only."
        )
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        raise text.wrong("partial_rotary_factor", partial, f"such that {head_dim} x it is even, and not 0")
    original = text.maybe_integer("original_max_position_embeddings")
    return rope_facts(raw, kind, theta, rotary_dim, context, original)


def rope_facts(
    raw: Fields, kind: str, theta: float, rotary_dim: int, context: int, original: int | None = None
) -> tuple[RopeFacts, int]:
    """RopeFacts, and the window: `context`, or what YaRN stretches the original window to if that is more.

    raw: the fields of rope_parameters. original: an original window stated elsewhere, which goes before.
    Raises UnsupportedModelError for a kind that is not built, CorruptFileError for values that cannot be.
    """
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise UnsupportedModelError(
            f"{raw.file}: the rope kind {kind!r} is not supported.",
            hint="default, linear, yarn and llama3 are.",
            rope_type=kind,
        )
    if kind == "default":
        return RopeFacts(theta, rotary_dim), context
    if kind == "linear":
        return RopeFacts(theta, rotary_dim, kind, factor=raw.number("factor", low=1.0)), context
    original = original or raw.maybe_integer("original_max_position_embeddings") or context
    if kind == "llama3":
        low, high = raw.number("low_freq_factor", low=1e-6), raw.number("high_freq_factor", low=1e-6)
        if high <= low:
            raise raw.wrong("high_freq_factor", high, f"above low_freq_factor {low:g}")
        factor = raw.number("factor", low=1.0)
        return RopeFacts(
            theta, rotary_dim, kind, factor, original, low_freq_factor=low, high_freq_factor=high
        ), context
    rope = RopeFacts(
        theta,
        rotary_dim,
        kind,
        factor=raw.number("factor", max(1.0, context / original), low=1.0),
        original_context=original,
        attention_factor=raw.maybe_number("attention_factor"),
        beta_fast=raw.maybe_number("beta_fast") or 32.0,
        beta_slow=raw.maybe_number("beta_slow") or 1.0,
        mscale=raw.maybe_number("mscale"),
        mscale_all_dim=raw.maybe_number("mscale_all_dim"),
        truncate=raw.flag("truncate", True),
    )
    return rope, max(context, int(original * rope.factor))


def _special_ids(top: Fields, text: Fields, family: str) -> dict[str, Any]:
    """bos and eos ids. Llama's configuration assumes 1 and 2 where the fields are absent (null is none)."""
    found: dict[str, tuple[int, ...]] = {}
    for name, default in (("bos_token_id", 1), ("eos_token_id", 2)):
        ids = text.ids(name) or top.ids(name)
        if family == "llama" and name not in text.values:
            ids = (default,)
        found[name] = ids
    return {"bos_id": next(iter(found["bos_token_id"]), None), "eos_ids": found["eos_token_id"]}
