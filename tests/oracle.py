"""transformers as the oracle: tiny models of every family, re-drawn so that every parameter matters.

Default initialisation proves nothing: with it a zeroed state or a dropped bias hardly moves a logit.
"""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
VOCAB = 193
BOUND = 1e-4
"""Of `relative_error` in fp32; reached are 1e-6 to 1e-5."""
BOUNDS_16_BIT = {torch.bfloat16: 0.04, torch.float16: 0.008}
"""Of `rms_error`; reached are 2.0 to 2.4 % and 0.25 to 0.3 %, by transformers 2.8 to 4.4 % and 0.4 to 1.2 %.
Single logits lie up to 5 % of the largest off in bf16, so their maximum says little."""

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
_HYBRID = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_SHARED = {"shared_expert_intermediate_size": 40}
_CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _MOE),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _MOE | _HYBRID | _SHARED),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _MOE | _HYBRID | _SHARED),
}
# Bends frequencies and scales cos and sin within a few hundred tokens.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
# What a config.json may say beside a family's usual fields: family and changed fields.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-yarn": ("qwen3", {"rope_parameters": _YARN}),
    "qwen3-yarn-factor": ("qwen3", {"rope_parameters": _YARN | {"attention_factor": 0.8}}),
    "qwen3_5-yarn": ("qwen3_5", {"rope_parameters": _YARN | {"partial_rotary_factor": 0.25}}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": _LINEAR}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "qwen3-attention-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe-raw-shares": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe-dense-layers": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 96,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def make_model(family: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A tiny fp32 model of the family with every parameter drawn anew."""
    config_name, model_name, fields = _CONFIGS[family]
    config = getattr(transformers, config_name)(**(_COMMON | fields | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config).eval().float()
        redraw(model)
    return model


def make_model_with_vision(seed: int = 0) -> transformers.PreTrainedModel:
    """A tiny qwen3_5 as it is published: text and vision parts, each with a config of its own."""
    config = transformers.Qwen3_5Config(text_config=_COMMON | _HYBRID, vision_config=_VISION)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.Qwen3_5ForConditionalGeneration(config).eval().float()
        redraw(model)
    return model


@torch.no_grad()
def redraw(model: torch.nn.Module) -> None:
    """Norms w + 0.3 n, biases 0.3 n, A_log in [-3, 0.5], dt_bias in [-4, 0], products 1.5 / sqrt(fan-in).

    The embedding is 0.1 n: small beside what the layers add, or a tied model only repeats its input.
    """
    for name, p in model.named_parameters():
        noise = torch.randn_like(p)
        if name.endswith("A_log"):
            p.copy_(torch.rand_like(p) * 3.5 - 3.0)
        elif name.endswith("dt_bias"):
            p.copy_(torch.rand_like(p) * 4.0 - 4.0)
        elif name.endswith("bias"):
            p.copy_(0.3 * noise)
        elif "norm" in name:
            p.add_(0.3 * noise)
        elif "embed_tokens" in name:
            p.copy_(0.1 * noise)
        else:
            p.copy_(noise * 1.5 / p.shape[-1] ** 0.5)


def save(
    model: transformers.PreTrainedModel, folder: Path, *, fused: bool = False, shards: bool = False
) -> Path:
    """Write the model as a checkpoint folder. fused: experts as 3-D tensors. shards: several files."""
    more: dict[str, Any] = {"max_shard_size": "300KB"} if shards else {}
    if fused:
        more["save_original_format"] = False
    model.save_pretrained(folder, **more)
    return folder


@cache
def shared_checkpoint(name: str) -> tuple[transformers.PreTrainedModel, Path]:
    """The model of a family or a variant, and its folder: one a process, nobody may change either."""
    import tempfile

    family, changes = VARIANTS.get(name, (name, {}))
    model = make_model(family, **changes)
    folder = Path(tempfile.mkdtemp(prefix=f"packhorse-{name}-"))
    return model, save(model, folder)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference over the largest wanted value."""
    return float((got - want).abs().max() / want.abs().max())


def rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The root mean square of the differences over that of the wanted values."""
    return float((got - want).norm() / want.norm())


@torch.no_grad()
def oracle_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] fp32 of one uninterrupted pass."""
    return model(torch.tensor([ids])).logits[0].float()


@torch.no_grad()
def oracle_greedy(model: transformers.PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """The next `count` greedy tokens, one step at a time through transformers' own cache."""
    cache = transformers.DynamicCache(config=model.config)
    out: list[int] = []
    feed = ids
    for _ in range(count):
        with warnings.catch_warnings():
            # 5.17 knows no other name, 5.24 warns of this one.
            warnings.filterwarnings("ignore", message=".*past_key_values.*", category=FutureWarning)
            logits = model(torch.tensor([feed]), past_key_values=cache, use_cache=True).logits[0, -1]
        out.append(int(logits.argmax()))
        feed = out[-1:]
    return out


def random_ids(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Seeded random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of a saved config.json; None removes a field."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            config.pop(name, None)
        else:
            config[name] = value
    path.write_text(json.dumps(config))
