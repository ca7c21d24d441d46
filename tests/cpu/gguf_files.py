"""Tiny GGUF files: models as llama.cpp's converter writes them, and raw files for damage.

What the converter does to a tensor is written here as lists of row numbers, one row at a time, so that it
shares nothing with the code that undoes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

ARCH = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")

_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate.": "ffn_gate_inp.",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}


def family_of(config: transformers.PretrainedConfig) -> str:
    return config.model_type.removesuffix("_text")


def metadata_of(config: transformers.PretrainedConfig, vocab: int) -> dict[str, Any]:
    """Metadata of a text config, by full key, without the tokenizer's merges."""
    family = family_of(config)
    arch = ARCH[family]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    own: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": vocab,
    }
    if rope["rope_type"] == "yarn":
        own |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if hasattr(config, "num_experts"):
        own |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
        }
    if family in HYBRIDS:
        own |= {
            "full_attention_interval": 4,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "rope.dimension_sections": [3, 3, 2, 0],
        }
    return {
        "general.architecture": arch,
        "general.name": f"Tiny {family}",
        **{f"{arch}.{key}": value for key, value in own.items() if value is not None},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(vocab - 2)]
        + ["<|im_end|>", "<|endoftext|>"],
        "tokenizer.ggml.token_type": [1] * (vocab - 2) + [3, 3],
        "tokenizer.ggml.merges": ["t 1", "t1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def converted(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """The model's tensors, fp32, under GGUF names and as llama.cpp's converter leaves them."""
    config = model.config.get_text_config()
    family = family_of(config)
    out: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().float()
        offset = (
            family in HYBRIDS
            and name.endswith("norm.weight")
            and not name.endswith("linear_attn.norm.weight")
        )
        value = value + 1 if offset else value
        top = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }
        if name in top:
            if not (name == "lm_head.weight" and config.tie_word_embeddings):
                out[top[name]] = value
            continue
        _, _, layer, leaf = name.split(".", 3)
        out |= {f"blk.{layer}.{new}": v for new, v in _layer_tensor(family, config, leaf, value).items()}
    return {name: np.ascontiguousarray(value.numpy()) for name, value in out.items()}


def _layer_tensor(family: str, config: Any, leaf: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    if leaf == "post_attention_layernorm.weight":
        return {"post_attention_norm.weight" if family in HYBRIDS else "ffn_norm.weight": value}
    if leaf == "mlp.experts.gate_up_proj":
        gate, up = value.chunk(2, dim=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if leaf == "linear_attn.in_proj_qkvz.weight":
        return _split_qkvz(config, value)
    if family == "llama" and leaf.startswith(("self_attn.q_proj", "self_attn.k_proj")):
        value = value[_llama_rows(value.shape[0], config.head_dim)]
    if leaf.startswith("linear_attn."):
        value = _delta_tensor(family, config, leaf, value)
    if leaf == "mlp.shared_expert_gate.weight":
        value = value.squeeze(0)
    old = next(name for name in sorted(_LAYER_NAMES, key=len, reverse=True) if leaf.startswith(name))
    return {leaf.replace(old, _LAYER_NAMES[old]): value}


def _llama_rows(num_rows: int, head_dim: int) -> list[int]:
    """Rope on neighbours: row 2i is row i of a head, row 2i + 1 its partner in the other half."""
    half = head_dim // 2
    rows = []
    for start in range(0, num_rows, head_dim):
        for pair in range(half):
            rows += [start + pair, start + half + pair]
    return rows


def _delta_tensor(family: str, config: Any, leaf: str, value: torch.Tensor) -> torch.Tensor:
    if leaf.endswith("A_log"):
        value = -torch.exp(value)
    if leaf.endswith("conv1d.weight"):
        value = value.squeeze(1)
    if family == "qwen3_next":
        return value
    keys, dim = config.linear_num_key_heads, config.linear_value_head_dim
    ratio = config.linear_num_value_heads // keys
    # Place j x keys + k of the file is the j-th value head of key head k.
    heads = [k * ratio + j for j in range(ratio) for k in range(keys)]
    rows = [head * dim + row for head in heads for row in range(dim)]
    part = leaf.split(".")[1]
    if part in ("A_log", "dt_bias", "in_proj_a", "in_proj_b"):
        return value[heads]
    if part == "in_proj_z":
        return value[rows]
    if part == "out_proj":
        return value[:, rows]
    if part in ("in_proj_qkv", "conv1d"):
        first = 2 * keys * config.linear_key_head_dim
        return value[list(range(first)) + [first + row for row in rows]]
    return value


def _split_qkvz(config: Any, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows grouped by key head, [q k v z] each, become all q, all k, all v; and all z."""
    dk, dv = config.linear_key_head_dim, config.linear_value_head_dim
    ratio = config.linear_num_value_heads // config.linear_num_key_heads
    sizes = {"q": dk, "k": dk, "v": ratio * dv, "z": ratio * dv}
    rows: dict[str, list[int]] = {part: [] for part in sizes}
    at = 0
    for _ in range(config.linear_num_key_heads):
        for part, size in sizes.items():
            rows[part] += range(at, at + size)
            at += size
    return {"attn_qkv.weight": value[rows["q"] + rows["k"] + rows["v"]], "attn_gate.weight": value[rows["z"]]}


def write(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    raw: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """A GGUF file. raw: tensors already in blocks, uint8 [rows, bytes of a row]."""
    writer = gguf.GGUFWriter(str(path), metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif key != "general.architecture":
            _add(writer, key, value)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    for name, (blocks, kind) in (raw or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_model(
    model: transformers.PreTrainedModel,
    path: Path,
    *,
    quant: gguf.GGMLQuantizationType | None = None,
    **more: Any,
) -> Path:
    """A transformers model as a GGUF file. quant: matrices whose rows allow it are stored in that type. more:
    further metadata, with `__` for `.` in keys."""
    config = model.config.get_text_config()
    metadata = metadata_of(config, model.get_input_embeddings().weight.shape[0])
    metadata |= {key.replace("__", "."): value for key, value in more.items()}
    tensors, raw = converted(model), {}
    if quant is not None:
        block = gguf.GGML_QUANT_SIZES[quant][0]
        for name, value in list(tensors.items()):
            if value.ndim >= 2 and value.shape[-1] % block == 0 and "conv1d" not in name:
                raw[name] = (gguf.quantize(tensors.pop(name), quant), quant)
    return write(path, metadata, tensors, raw)


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random valid blocks, uint8 [rows, bytes of a row]: any bits, with finite and moderate scales."""
    rng = np.random.default_rng(seed)
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = rows * columns // block_len
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    places = {
        "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
        "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    }.get(kind.name, [])  # fmt: skip
    for place in places:
        scales = rng.uniform(-0.1, 0.1, count).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(count, 2)
    if kind.name == "Q8_K":
        blocks[:, :4] = rng.uniform(-0.1, 0.1, count).astype(np.float32).view(np.uint8).reshape(count, 4)
    if kind.name in ("F32", "F16", "BF16"):
        values = torch.from_numpy(rng.standard_normal(count).astype(np.float32))
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind.name]
        blocks = values.to(dtype).view(torch.uint8).numpy().reshape(count, block_bytes)
    return blocks.reshape(rows, -1)
