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


def make_model(family: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A tiny fp32 model of the family with every parameter drawn anew."""
    config_name, model_name, fields = _CONFIGS[family]
    config = getattr(transformers, config_name)(**(_COMMON | fields | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config).eval().float()
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
def shared_checkpoint(family: str) -> tuple[transformers.PreTrainedModel, Path]:
    """One model and its folder a process; nobody may change either."""
    import tempfile

    model = make_model(family)
    folder = Path(tempfile.mkdtemp(prefix=f"packhorse-{family}-"))
    return model, save(model, folder)


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
