"""Makes the checkpoints of this folder with GPTQModel, which the tests do not need.

    pip install gptqmodel==7.7.0
    GPTQMODEL_CPU_WORKERS=2 PYTHONPATH=tests python tests/data/gptqmodel/make.py

A checkpoint is a tiny model that the library has calibrated, quantized and saved, with the declaration it writes, and
the logits [T, V] that transformers computes with the weights that the library's own module unpacks (`logits.npy`).
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from gptqmodel import GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import oracle
from library_models import HYBRID, IDS, MOE, SMALL

HERE = Path(__file__).parent
KINDS = {
    "symmetric": {"sym": True},
    "desc-act": {"sym": True, "desc_act": True},
    "asymmetric": {"sym": False},
    "asymmetric-v2": {"sym": False, "format": "gptq_v2"},
    "8-rows": {"sym": True, "bits": 8, "group_size": -1, "act_group_aware": False},
    "desc-act-asymmetric": {"sym": False, "desc_act": True},
    "awq": {"sym": False, "quant_method": "awq", "format": "gemm"},
    "awq-symmetric": {"sym": True, "quant_method": "awq", "format": "gemm"},
}


def tiny(family: str, folder: Path, **changes: int):
    own = (MOE if "moe" in family else {}) | (HYBRID if family in oracle.HYBRIDS else {})
    model = oracle.make_model(family, **(SMALL | own | changes))
    with torch.no_grad():
        # Rows without a negative value have the zero 0, which version 1 stores as -1.
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "down_proj.weight")):
                weight[1::3] = weight[1::3].abs() + 0.1
    oracle.save(model, folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2").save_pretrained(folder)
    return model


def unpacked(folder: Path, fields: dict) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, by the library's module in fp32."""
    stored = load_file(folder / "model.safetensors")
    values = {name: value.float() for name, value in stored.items() if value.dtype == torch.bfloat16}
    for name, words in stored.items():
        if not name.endswith(".qweight"):
            continue
        prefix = name.removesuffix("qweight")
        bits = fields.get("bits", 4)
        if fields.get("quant_method") == "awq":
            parts = words, stored[prefix + "qzeros"], stored[prefix + "scales"].float()
            values[prefix + "weight"] = dequantize_gemm(*parts, bits, 32).T.contiguous()
            continue
        module = TorchLinear(
            bits=bits,
            group_size=fields.get("group_size", 32),
            sym=fields["sym"],
            desc_act=fields.get("desc_act", False),
            in_features=words.shape[0] * 32 // bits,
            out_features=words.shape[1],
            bias=False,
            pack_dtype=torch.int32,
        )
        for role in ("qweight", "qzeros", "scales", "g_idx"):
            module.register_buffer(role, stored[prefix + role])
        module.post_init()
        if "format" not in fields:
            convert_gptq_v1_to_v2_format_module(module, bits=bits, pack_dtype=torch.int32)
        module.scales = module.scales.float()
        values[prefix + "weight"] = module.dequantize_weight().T.contiguous().float()
    return values


def make(family: str, kind: str) -> None:
    fields = KINDS[kind]
    out = HERE / f"{family}-{kind}"
    with tempfile.TemporaryDirectory() as work:
        source = Path(work, "source")
        # AWQ's search takes 64 rows at a time.
        rows = {"intermediate_size": 128, "head_dim": 64} if kind.startswith("awq") else {}
        model = tiny(family, source, **rows)
        config = QuantizeConfig(**({"bits": 4, "group_size": 32, "offload_to_disk": False} | fields))
        quantized = GPTQModel.load(str(source), config)
        torch.manual_seed(0)
        texts = [torch.randint(3, 32, (1, 128)) for _ in range(8)]
        quantized.quantize(
            [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts], batch_size=1
        )
        quantized.save(str(Path(work, "out")))
        out.mkdir(exist_ok=True)
        for name in ("model.safetensors", "config.json"):
            shutil.copyfile(Path(work, "out", name), out / name)
        with torch.no_grad():
            save_file(unpacked(out, fields), source / "model.safetensors")
            loaded = type(model).from_pretrained(source, dtype=torch.float32).eval()
        np.save(out / "logits.npy", oracle.oracle_logits(loaded, IDS).numpy())


if __name__ == "__main__":
    for kind in KINDS:
        make("qwen3", kind)
    for family in ("qwen3_moe", "qwen3_5", "qwen3_5_moe"):
        make(family, "desc-act-asymmetric")
        make(family, "symmetric")
