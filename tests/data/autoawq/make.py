"""Makes the checkpoints of this folder with AutoAWQ, which the tests do not need.

    pip download --no-deps --no-binary :all: autoawq==0.2.9 && tar xzf autoawq-0.2.9.tar.gz
    PYTHONPATH=tests:autoawq-0.2.9 python tests/data/autoawq/make.py

AutoAWQ is no longer kept up and its own loop over models does not start beside today's transformers; its quantizer's
rounding, its packing, its unpacking and its declaration do. A checkpoint is a tiny model whose matrices these have
rounded and packed, and the logits [T, V] that transformers computes with what they unpack (`logits.npy`).
"""

import sys
import types
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import oracle
from library_models import HYBRID, IDS, MOE, PLAIN, SMALL

HERE = Path(__file__).parent
ROOT = next(Path(folder, "awq") for folder in sys.path if Path(folder, "awq", "quantize").is_dir())
# Only the modules that are used: others ask for data sets and for models that transformers has dropped.
for name in ("awq", "awq.models", "awq.quantize"):
    package = types.ModuleType(name)
    package.__path__ = [str(ROOT.joinpath(*name.split(".")[1:]))]
    sys.modules[name] = package
for name, gives in (
    ("awq.utils.calib_data", ["get_calib_dataset"]),
    ("awq.quantize.scale", ["apply_scale", "apply_clip"]),
):
    sys.modules[name] = types.ModuleType(name)
    for function in gives:
        setattr(sys.modules[name], function, None)

from awq.models._config import AwqConfig  # noqa: E402
from awq.modules.linear.gemm import WQLinear_GEMM  # noqa: E402
from awq.quantize.quantizer import AwqQuantizer  # noqa: E402
from awq.utils.packing_utils import dequantize_gemm  # noqa: E402

BITS, GROUP = 4, 32


def make(family: str) -> None:
    changes = SMALL | (MOE if "moe" in family else {}) | (HYBRID if family in oracle.HYBRIDS else {})
    model = oracle.make_model(family, **changes)
    folder = oracle.save(model, HERE / family)
    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.w_bit, quantizer.group_size, quantizer.zero_point = BITS, GROUP, True
    tensors, values = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim < 2 or any(part in name for part in PLAIN):
            tensors[name] = values[name] = weight
            continue
        linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight.data, scales, zeros = quantizer.pseudo_quantize_tensor(weight)
        packed = WQLinear_GEMM.from_linear(
            linear, BITS, GROUP, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        stored = packed.state_dict()
        module = name.removesuffix("weight")
        tensors |= {module + role: value.contiguous() for role, value in stored.items()}
        args = stored["qweight"], stored["qzeros"], stored["scales"].float(), BITS, GROUP
        values[name] = dequantize_gemm(*args).t().contiguous()
    save_file(tensors, folder / "model.safetensors")
    declared = AwqConfig(q_group_size=GROUP, w_bit=BITS, version="GEMM").to_transformers_dict()
    oracle.edit_config(folder, quantization_config=declared)
    reference = oracle.save(model, HERE / "reference")
    save_file(values, reference / "model.safetensors")
    with torch.no_grad():
        loaded = type(model).from_pretrained(reference, dtype=torch.float32).eval()
    np.save(folder / "logits.npy", oracle.oracle_logits(loaded, IDS).numpy())
    for file in (*reference.iterdir(), folder / "generation_config.json"):
        file.unlink(missing_ok=True)
    reference.rmdir()


for family in ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"):
    make(family)
