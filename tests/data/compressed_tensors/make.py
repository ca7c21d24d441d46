"""Makes the checkpoints of this folder with the compressed-tensors library, which the tests do not need.

    pip install compressed-tensors==0.20.1
    PYTHONPATH=tests python tests/data/compressed_tensors/make.py

A checkpoint is a tiny model whose matrices the library has quantized and packed, the library's own declaration, and
the logits [T, V] that transformers computes with the weights that the library unpacks (`logits.npy`).
"""

import json
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

import oracle
from library_models import IDS, MOE, PLAIN

HERE = Path(__file__).parent
SMALL = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
HYBRID = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
KINDS = {
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}),
    "int4-asymmetric": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    "int8-channel": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}),
}  # fmt: skip


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.unflatten(-1, (-1, args.group_size or weight.shape[-1]))
    return groups.amin(-1), groups.amax(-1)


def make(family: str, kind: str) -> None:
    form, fields = KINDS[kind]
    changes = SMALL | (MOE if "moe" in family else {}) | (HYBRID if family in oracle.HYBRIDS else {})
    model = oracle.make_model(family, **changes)
    folder = oracle.save(model, HERE / f"{family}-{kind}")
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    library = BaseCompressor.get_value_from_registry(form)
    tensors, values = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim < 2 or any(part in name for part in PLAIN):
            tensors[name] = values[name] = weight
            continue
        scale, zero = calculate_qparams(*extremes(weight, args), args)
        state = {"weight": weight, "weight_scale": scale.half().float(), "weight_zero_point": zero}
        packed = library.compress(state, scheme)
        values[name] = library.decompress(packed, scheme)["weight"].float()
        module = name.removesuffix("weight")
        for role, value in packed.items():
            tensors[module + role] = (
                value.half().contiguous() if role == "weight_scale" else value.contiguous()
            )
    save_file(tensors, folder / "model.safetensors")
    declared = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format=form,
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    oracle.edit_config(folder, quantization_config=json.loads(declared.model_dump_json()))
    with torch.no_grad():
        reference = oracle.save(model, HERE / "reference")
        save_file(values, reference / "model.safetensors")
        loaded = type(model).from_pretrained(reference, dtype=torch.float32).eval()
    np.save(folder / "logits.npy", oracle.oracle_logits(loaded, IDS).numpy())
    for file in (*reference.iterdir(), folder / "generation_config.json"):
        file.unlink(missing_ok=True)
    reference.rmdir()


for kind in KINDS:
    make("qwen3", kind)
for family in ("qwen3_moe", "qwen3_5", "qwen3_5_moe"):
    make(family, "int4-asymmetric")
