"""Packed checkpoint folders: GPTQ, AWQ, compressed-tensors, FP8 and our own declaration.

The packing is written here a second time, one value at a time, from the formats' documentation, and shares nothing
with the code under test. The reference is transformers with the values that the codes stand for.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import oracle
from engines import one_pass
from library_models import PLAIN
from packhorse.cli import main as cli
from packhorse.core.errors import PackhorseError, UnsupportedModelError, WeightsError
from packhorse.facts.packed import packed_matrices
from packhorse.facts.read import read_model
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model
from packhorse.plan import account

IDS = oracle.random_ids(60, seed=4)
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
WIDE_MOE = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
Packed = dict[str, torch.Tensor]


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """[n, m] codes -> int32 [n, ceil(m x bits / 32)], the first code in the lowest bits."""
    per = 32 // bits
    rows, width = values.shape
    out = np.zeros((rows, -(-width // per)), np.uint32)
    for column in range(width):
        out[:, column // per] |= values[:, column].astype(np.uint32) << np.uint32(bits * (column % per))
    return out.view(np.int32)


def quantize(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, order: np.ndarray | None = None
):
    """Codes [N, K], scales and zeros [N, G], the group of each column, and the values they stand for."""
    N, K = weight.shape
    groups = np.arange(K) // group
    if order is not None:
        groups = groups[order]
    codes, values = np.zeros((N, K), np.int64), np.zeros((N, K), np.float32)
    num = groups.max() + 1
    scales, zeros = np.zeros((N, num), np.float16), np.zeros((N, num), np.int64)
    for g in range(num):
        part = weight[:, groups == g].numpy()
        if symmetric:
            scale = np.abs(part).max(1) / (2 ** (bits - 1) - 1)
            zero = np.full(N, 2 ** (bits - 1))
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / (2**bits - 1)
            zero = np.round(-low / scale).clip(0, 2**bits - 1)
        scale = scale.astype(np.float16)
        q = np.round(part / scale[:, None].astype(np.float32) + zero[:, None]).clip(0, 2**bits - 1)
        codes[:, groups == g], scales[:, g], zeros[:, g] = q, scale, zero
        values[:, groups == g] = (q - zero[:, None]) * scale[:, None].astype(np.float32)
    return codes, scales, zeros, groups, torch.from_numpy(values)


def gptq(weight: torch.Tensor, *, bits=4, group=32, symmetric=True, version=1, act_order=False, seed=0):
    K = weight.shape[1]
    order = np.random.default_rng(seed).permutation(K) if act_order else None
    codes, scales, zeros, groups, values = quantize(
        weight, bits, K if group == -1 else group, symmetric=symmetric, order=order
    )
    ones = int(
        "1" * 8 if bits == 4 else "01" * 4, 16
    )  # version 1 takes 1 off each, with borrows between them
    stored = words(zeros.T, bits).view(np.uint32) - np.uint32(ones if version == 1 else 0)
    return {
        "qweight": torch.from_numpy(words_down(codes.T, bits)),
        "qzeros": torch.from_numpy(stored.view(np.int32)),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }, values  # fmt: skip


def words_down(values: np.ndarray, bits: int) -> np.ndarray:
    """[K, N] codes -> int32 [K x bits / 32, N], packed along K."""
    return words(values.T, bits).T.copy()


def awq(weight: torch.Tensor, *, group=32):
    codes, scales, zeros, _, values = quantize(weight, 4, group, symmetric=False)
    shuffled = [8 * c + i for c in range(weight.shape[0] // 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    return {
        "qweight": torch.from_numpy(words(codes.T[:, shuffled], 4)),
        "qzeros": torch.from_numpy(words(zeros.T[:, shuffled], 4)),
        "scales": torch.from_numpy(scales.T.copy()),
    }, values


def compressed(
    weight: torch.Tensor, *, bits=4, group=32, symmetric=True, act_order=False, dtype=torch.float16
):
    K = weight.shape[1]
    order = np.random.default_rng(1).permutation(K) if act_order else None
    codes, scales, zeros, groups, values = quantize(
        weight, bits, group or K, symmetric=symmetric, order=order
    )
    packed = {
        "weight_packed": torch.from_numpy(words(codes, bits)),
        "weight_scale": torch.from_numpy(scales).to(dtype),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        packed["weight_zero_point"] = torch.from_numpy(words_down(zeros, bits))
    if act_order:
        packed["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return packed, values


def fp8(weight: torch.Tensor, *, shape="block", name="weight_scale_inv", dtype=torch.bfloat16):
    N, K = weight.shape
    rows, cols = {"block": (128, 128), "channel": (1, K), "tensor": (N, K)}[shape]
    scales = torch.zeros(-(-N // rows), -(-K // cols), dtype=dtype)
    q, values = torch.zeros(N, K, dtype=torch.float8_e4m3fn), torch.zeros(N, K)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(rows * i, rows * i + rows), slice(cols * j, cols * j + cols)
            scales[i, j] = weight[at].abs().max() / 448
            q[at] = (weight[at] / scales[i, j].float()).to(torch.float8_e4m3fn)
            values[at] = q[at].float() * scales[i, j].float()
    return {"weight": q, name: scales.flatten() if shape == "tensor" else scales}, values


def own(weight: torch.Tensor, *, bits=4, group=64, symmetric=True):
    codes, scales, zeros, _, values = quantize(weight.flatten(0, -2), bits, group, symmetric=symmetric)
    lead = weight.shape[:-1]
    q = words(codes, bits).view(np.uint8)
    packed = {
        "q": torch.from_numpy(q.copy()).view(*lead, -1),
        "scale": torch.from_numpy(scales).view(*lead, -1),
    }
    if not symmetric:
        packed["zero"] = torch.from_numpy(zeros.astype(np.float16)).view(*lead, -1)
    return packed, values.view(weight.shape)


def ct_config(bits=4, group: int | None = 32, symmetric=True, form="pack-quantized", kind="int", **more: Any):
    strategy = more.pop("strategy", "group" if group else "channel")
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group,
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | more, "input_activations": None}},
    }  # fmt: skip


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
OWN = {"quant_method": "packhorse", "version": 1, "modules": {".*": "int4-g64"}}
CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "gptq": (GPTQ, gptq, {}),
    "gptq-asymmetric": (GPTQ | {"sym": False}, gptq, {"symmetric": False}),
    "gptq-v2": (
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, gptq, {"symmetric": False, "version": 2},
    ),
    "gptq-v2-symmetric": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq, {"version": 2}),
    "gptq-desc-act": (GPTQ | {"desc_act": True}, gptq, {"act_order": True}),
    "gptq-8-rows": (GPTQ | {"bits": 8, "group_size": -1}, gptq, {"bits": 8, "group": -1}),
    "awq": (AWQ, awq, {}),
    "compressed": (ct_config(), compressed, {}),
    "compressed-asymmetric": (ct_config(symmetric=False), compressed, {"symmetric": False}),
    "compressed-8-channel": (ct_config(8, None), compressed, {"bits": 8, "group": None, "dtype": torch.float32}),
    "compressed-act-order": (ct_config(actorder="group"), compressed, {"act_order": True}),
    "compressed-fp8": (
        ct_config(8, None, form="float-quantized", kind="float"),
        fp8, {"shape": "channel", "name": "weight_scale"},
    ),
    "fp8": (FP8, fp8, {}),
    "fp8-tensor": (FP8 | {"weight_block_size": None}, fp8, {"shape": "tensor", "name": "weight_scale"}),
    "own": (OWN, own, {}),
    "own-8-zeros": (OWN | {"modules": {".*": "int8z-g32"}}, own, {"bits": 8, "group": 32, "symmetric": False}),
}  # fmt: skip
FAMILIES = ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")


def wide_model(family: str):
    return oracle.make_model(family, **(WIDE | (WIDE_MOE if "moe" in family else {})))


def packed_folder(model, folder: Path, case: str, *, fused: bool = False):
    """The model packed, and the model with the values that its codes stand for."""
    quant, pack, options = CASES[case]
    oracle.save(model, folder, fused=fused)
    state, tensors, values = load_file(folder / "model.safetensors"), {}, {}
    for name, value in state.items():
        if value.ndim < 2 or any(part in name for part in PLAIN):
            tensors[name] = values[name] = value
            continue
        packed, values[name] = pack(value, **options)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{role}": tensor.contiguous() for role, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors")
    oracle.edit_config(folder, quantization_config=quant)
    reference = folder.with_name(folder.name + "-values")
    shutil.copytree(folder, reference)
    save_file(values, reference / "model.safetensors")
    oracle.edit_config(reference, quantization_config=None)
    with torch.no_grad():
        return type(model).from_pretrained(reference, dtype=torch.float32).eval()


def load(folder: Path, *, packed: bool = True):
    facts = read_model(folder)
    return load_model(facts, open_checkpoint(facts), dtype=torch.float32, packed=packed)


EVERYWHERE = ("gptq", "gptq-desc-act", "awq", "compressed", "fp8", "own")


@pytest.mark.parametrize(
    ("family", "case"),
    [(family, case) for family in FAMILIES for case in (CASES if family == "qwen3_5_moe" else EVERYWHERE)],
)
def test_logits_are_those_of_the_values(family, case, tmp_path):
    fused = case.startswith("own") and "moe" in family
    reference = packed_folder(wide_model(family), tmp_path / "m", case, fused=fused)
    want = oracle.oracle_logits(reference, IDS)
    facts = read_model(tmp_path / "m")
    ours = load(tmp_path / "m")
    assert oracle.relative_error(one_pass(ours, IDS), want) < oracle.BOUND
    assert ours.storage_bytes == account.weight_bytes(facts, "fp32", packed=True)
    kinds = {matrix.kind for matrix in packed_matrices(facts)}
    ordered = "order" in case or "desc" in case
    assert ("experts" in kinds) == ("moe" in family and not ordered)
    assert oracle.relative_error(one_pass(load(tmp_path / "m", packed=False), IDS), want) < oracle.BOUND


# Damage: what a file or a declaration may not be, and every way must end in an error of ours.
Change = tuple[str, Any]
BAD_CONFIG: dict[str, list[Change]] = {
    "gptq": [
        ("bits", 3), ("bits", "4"), ("bits", True), ("bits", None), ("group_size", 0), ("group_size", -2),
        ("group_size", 48), ("group_size", "32"), ("group_size", 64), ("sym", "yes"), ("desc_act", 1),
        ("checkpoint_format", "marlin"), ("checkpoint_format", "gptq_v2"), ("pack_dtype", "int8"),
        ("quant_method", "gptq2"), ("dynamic", {"(": {"bits": 4}}), ("dynamic", {".*up_proj": {"bits": 2}}),
    ],
    "awq": [
        ("bits", 8), ("version", "gemv"), ("version", "marlin"), ("zero_point", False), ("zero_point", None),
        ("group_size", 16), ("group_size", 1.5), ("quant_method", "awq_marlin"),
    ],
    "compressed": [
        ("format", "nvfp4-pack-quantized"), ("format", "int-quantized"), ("format", None), ("config_groups", {}),
        ("config_groups", {"group_0": 3}), ("config_groups", {"group_0": {"targets": ["Linear"]}}),
        ("quantization_status", "frozen"), ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("num_bits", 3), ("num_bits", 8), ("num_bits", "4"), ("type", "float"), ("type", "uint"), ("strategy", "token"),
        ("strategy", "block"), ("group_size", None), ("group_size", 33), ("symmetric", "yes"), ("actorder", "dynamic"),
        ("targets", ["Embedding"]), ("targets", [3]), ("targets", ["re:("]),
    ],
    "fp8": [
        ("fmt", "e5m2"), ("weight_block_size", [128]), ("weight_block_size", [128, 100]),
        ("weight_block_size", [64, 128]),
        ("weight_block_size", [0, 128]), ("weight_block_size", "128"), ("weight_block_size", [True, 128]),
    ],
    "own": [
        ("version", 2), ("version", None), ("version", True), ("modules", {}), ("modules", {".*": "int3-g64"}),
        ("modules", {"(": "int4-g64"}), ("modules", {".*": "int4z-g64"}), ("modules", {".*": "int8-g64"}),
        ("modules", {".*": "int4-g128"}), ("modules", {".*": 4}), ("modules", [1]), ("modules", {".*": "q4_k"}),
    ],
}  # fmt: skip
METHODS_OF_OTHERS = ("bitsandbytes", "modelopt", "mxfp4", "auto-round", "hqq", "exl3", None)
INNER = ("num_bits", "type", "strategy", "group_size", "symmetric", "actorder")


def damaged_config(quant: dict[str, Any], change: Change) -> dict[str, Any]:
    quant = json.loads(json.dumps(quant))
    name, value = change
    inside = quant.get("config_groups", {}).get("group_0", {})
    place = quant
    if inside and name in INNER:
        place = inside["weights"]
    elif inside and name == "targets":
        place = inside
    place[name] = value
    return quant


def poisoned(tensors: Packed, role: str, value: float, rng: random.Random) -> None:
    """One value of one tensor with this role."""
    codes = [name for name in tensors if role != "weight" or tensors[name].dtype == torch.float8_e4m3fn]
    name = rng.choice(sorted(name for name in codes if name.endswith("." + role)))
    flat = tensors[name].clone().flatten()
    index = rng.randrange(len(flat))
    if flat.dtype == torch.float8_e4m3fn:
        flat.view(torch.uint8)[index] = 0x7F
    else:
        flat[index] = value
    tensors[name] = flat.view(tensors[name].shape)


def damaged_tensors(case: str, tensors: Packed, rng: random.Random) -> str:
    """Damages one of the packed tensors and says how."""
    scale = {"gptq": "scales", "awq": "scales", "compressed": "weight_scale", "own": "scale"}
    role = scale.get(case.split("-")[0], "weight_scale_inv")
    ways = ["missing", "shape", "type", "nan", "zero", "inf", "transposed"]
    ways += {"gptq-desc-act": ["group", "negative", "order"], "gptq": ["midpoint", "order"], "fp8": ["code"],
             "compressed": ["said"], "compressed-act-order": ["said", "group", "negative", "order"],
             "compressed-8-channel": ["huge"], "own-8-zeros": ["offset"]}.get(case, [])  # fmt: skip
    way = rng.choice(ways)
    # The order of a file that declares none may be missing.
    spare = ("g_idx",) if case in ("gptq", "gptq-asymmetric") else ()
    packed = sorted(
        name for name in tensors
        if name.rpartition(".")[2] in ROLES and not name.endswith(spare) and tensors[name].numel() > 1
    )  # fmt: skip
    name = rng.choice(packed)
    if way == "missing":
        del tensors[name]
    elif way == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif way == "transposed":
        wide = [n for n in packed if tensors[n].ndim == 2 and tensors[n].shape[0] != tensors[n].shape[1]]
        name = rng.choice(wide)
        tensors[name] = tensors[name].t().contiguous()
    elif way == "type":
        tensors[name] = tensors[name].to(torch.float64)
    elif way == "huge":
        poisoned(tensors, role, 70_000.0, rng)
    elif way in ("nan", "zero", "inf"):
        poisoned(tensors, role, {"nan": float("nan"), "zero": 0.0, "inf": float("inf")}[way], rng)
    elif way in ("group", "negative"):
        groups = "weight_g_idx" if case.startswith("compressed") else "g_idx"
        poisoned(tensors, groups, 99 if way == "group" else -1, rng)
    elif way == "order":
        name = rng.choice(sorted(name for name in tensors if name.endswith("g_idx")))
        groups = tensors[name].clone()
        groups[groups == 0] = 1
        tensors[name] = groups
    elif way == "midpoint":
        poisoned(tensors, "qzeros", 0x12345678, rng)
    elif way == "said":
        poisoned(tensors, "weight_shape", 7, rng)
    elif way == "offset":
        poisoned(tensors, "zero", 300.0, rng)
    else:
        poisoned(tensors, "weight", 0, rng)
    return way


ROLES = ("qweight", "qzeros", "scales", "weight_packed", "weight_scale", "weight_shape", "weight_scale_inv", "q",
         "scale", "zero", "g_idx", "weight_g_idx")  # fmt: skip


DAMAGED = ("gptq", "gptq-asymmetric", "gptq-desc-act", "awq", "compressed", "compressed-8-channel",
           "compressed-act-order", "fp8", "own", "own-8-zeros")  # fmt: skip


@pytest.fixture(scope="module")
def small_folders(tmp_path_factory) -> dict[str, Path]:
    """One small folder a case: one layer with experts, one without."""
    folders = {}
    model = oracle.make_model("qwen3_moe", **WIDE, **WIDE_MOE, num_experts=2, num_experts_per_tok=1)
    for case in DAMAGED:
        folders[case] = tmp_path_factory.mktemp("small") / case
        packed_folder(model, folders[case], case)
    return folders


def refused(folder: Path) -> PackhorseError:
    """The error of ours that loading the folder ends in."""
    with pytest.raises(PackhorseError) as error:
        load(folder)
    assert error.value.hint and len(str(error.value)) < 1000
    return error.value


def test_declarations_that_cannot_be_are_refused(small_folders, tmp_path):
    count = 0
    for case, changes in BAD_CONFIG.items():
        folder = tmp_path / case
        shutil.copytree(small_folders[case], folder)
        for change in [*changes, *(("quant_method", method) for method in METHODS_OF_OTHERS)]:
            oracle.edit_config(folder, quantization_config=damaged_config(CASES[case][0], change))
            error = refused(folder)
            count += 1
            if change[0] == "quant_method" and change[1] in METHODS_OF_OTHERS[:-1]:
                assert isinstance(error, UnsupportedModelError) and str(change[1]) in error.reason
                assert "GGUF" in error.hint
    assert count >= 100


def test_tensors_that_cannot_be_are_refused(small_folders, tmp_path):
    """350 damaged files; every way occurs: names, shapes, types, scales, zeros, codes, and orders of inputs."""
    seen = set()
    for case, source in small_folders.items():
        folder = tmp_path / case
        shutil.copytree(source, folder)
        clean = load_file(source / "model.safetensors")
        for seed in range(35):
            tensors = dict(clean)
            way = damaged_tensors(case, tensors, random.Random(f"{case}{seed}"))
            seen.add(way)
            save_file(tensors, folder / "model.safetensors")
            try:
                error = refused(folder)
            except pytest.fail.Exception as silent:
                raise AssertionError(f"{case} {seed}: {way} was accepted") from silent
            assert isinstance(error, WeightsError | UnsupportedModelError), (way, error)
    assert len(seen) == 15


def test_damaged_bytes_never_crash(small_folders, tmp_path):
    """Cut files and flipped bits of headers: refused, or read as what they then say."""
    folder = tmp_path / "m"
    shutil.copytree(small_folders["compressed"], folder)
    data = (folder / "model.safetensors").read_bytes()
    rng = random.Random(7)
    header = int.from_bytes(data[:8], "little") + 8
    for turn in range(60):
        if turn % 3 == 0:
            damaged = data[: rng.randrange(len(data))]
        else:
            at, bit = rng.randrange(header), rng.randrange(8)
            damaged = data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
        (folder / "model.safetensors").write_bytes(damaged)
        refused(folder)


def test_two_kinds_of_one_weight_are_refused(small_folders, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(small_folders["gptq"], folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"{name}.weight"] = torch.zeros(256, 128)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="a packed weight and a plain one"):
        load(folder)


def test_scales_of_activations_are_left_out_and_an_order_is_not(small_folders, tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(small_folders["compressed"], folder)
    tensors = load_file(folder / "model.safetensors")
    spare = {
        "model.layers.0.self_attn.q_proj.input_scale": torch.ones(1),
        "model.layers.0.self_attn.k_scale": torch.ones(1),
    }
    save_file(tensors | spare, folder / "model.safetensors")
    assert torch.equal(one_pass(load(folder), IDS), one_pass(load(small_folders["compressed"]), IDS))
    order = {"model.layers.0.self_attn.q_proj.weight_g_idx": (torch.arange(128) // 32).flip(0).int()}
    save_file(tensors | order, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="the declaration says that it has none"):
        load(folder)


def test_dynamic_rules_and_groups_of_a_declaration(tmp_path):
    """Modules of one file in several ways: 8 bits where a rule says so, and modules a rule leaves out."""
    model = wide_model("qwen3")
    folder = tmp_path / "m"
    oracle.save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    values = dict(tensors)
    for name in [name for name in tensors if ".mlp." in name]:
        options = {"bits": 8, "group": 64} if "down_proj" in name else {}
        packed, values[name] = gptq(tensors.pop(name), **options)
        tensors |= {f"{name.removesuffix('.weight')}.{role}": t for role, t in packed.items()}
    save_file(tensors, folder / "model.safetensors")
    rules = {"-:.*attn.*": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 64}}
    oracle.edit_config(folder, quantization_config=GPTQ | {"dynamic": rules})
    forms = {(m.kind, m.form.name, m.num_rows) for m in packed_matrices(read_model(folder))}
    assert forms == {("mlp", "int4-g32", 192), ("mlp", "int8-g64", 128)}
    with torch.no_grad():
        model.load_state_dict(values)
    assert oracle.relative_error(one_pass(load(folder), IDS), oracle.oracle_logits(model, IDS)) < oracle.BOUND


_MEMORY = """
import sys, threading
import torch
from packhorse.facts.read import read_model
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model

def own():
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

torch.set_num_threads(1)
facts = read_model(sys.argv[1])
seen, ended = [own()], threading.Event()

def watch():
    while not ended.wait(0.002):
        seen.append(own())

watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(facts, open_checkpoint(facts), dtype=torch.float32, packed=True)
ended.set()
watcher.join()
print(max(seen) - seen[0] - model.storage_bytes)
"""


def large(rows: int, cols: int, case: str) -> Packed:
    """A matrix in the case's format whose codes are random."""
    draw = torch.Generator().manual_seed(rows + cols)
    if case == "fp8":
        codes = torch.randint(0, 120, (rows, cols), dtype=torch.uint8, generator=draw)
        scales = torch.full((-(-rows // 128), -(-cols // 128)), 0.01)
        return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scales}
    shape, groups = (cols, rows // 8) if case == "awq" else (cols // 8, rows), cols // 32
    found = {
        "qweight": torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=draw),
        "qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((groups, rows), 0.01, dtype=torch.float16),
    }
    order = torch.randperm(cols, generator=draw) // 32
    return found if case == "awq" else found | {"g_idx": order.int()}


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ("gptq-desc-act", "fp8")]


@pytest.mark.parametrize("case", ["awq", *SLOW])
def test_a_file_is_read_in_the_memory_of_its_largest_tensor(case, tmp_path):
    """Beside the result: a tensor as stored, in rows' order too, and slices. A matrix has 16 Mi values here."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 1, "max_window_layers": 1}
    oracle.save(oracle.make_model("qwen3", **sizes), tmp_path)
    tensors, largest = load_file(tmp_path / "model.safetensors"), 0
    for name in [
        name for name in tensors if tensors[name].ndim == 2 and not any(part in name for part in PLAIN)
    ]:
        packed = large(*tensors.pop(name).shape, case)
        largest = max(largest, *(tensor.nbytes for tensor in packed.values()))
        tensors |= {f"{name.removesuffix('.weight')}.{role}": tensor for role, tensor in packed.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    oracle.edit_config(tmp_path, quantization_config=CASES[case][0])
    run = [sys.executable, "-c", _MEMORY, str(tmp_path)]
    beside = int(subprocess.run(run, check=True, capture_output=True).stdout)
    assert 0 < beside < 2 * largest + 24 * 2**20


LIBRARIES = Path(__file__).parents[1] / "data"
BY_LIBRARIES = sorted(
    file.parent
    for library in ("autoawq", "compressed_tensors", "gptqmodel")
    for file in (LIBRARIES / library).glob("*/config.json")
)


def test_each_format_has_a_checkpoint_of_its_library_for_each_family():
    found = {(folder.parent.name, read_model(folder).family) for folder in BY_LIBRARIES}
    assert found == {(folder.parent.name, family) for folder in BY_LIBRARIES for family in FAMILIES}
    assert len(BY_LIBRARIES) >= 22


@pytest.mark.parametrize("folder", BY_LIBRARIES, ids=lambda p: f"{p.parent.name}-{p.name}")
@pytest.mark.parametrize("packed", [True, False])
def test_checkpoints_of_the_formats_own_libraries(folder, packed):
    """Made by the libraries themselves (make.py there); logits of their own unpacking, by transformers, beside them."""
    want = torch.from_numpy(np.load(folder / "logits.npy"))
    model = load(folder, packed=packed)
    assert oracle.relative_error(one_pass(model, list(range(3, 27))), want) < oracle.BOUND
    assert any(True for _ in packed_matrices(read_model(folder)))


def test_inspect_shows_classes_formats_and_bytes(small_folders, capsys):
    facts = read_model(small_folders["compressed"])
    assert cli.run(["inspect", str(facts.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    matrices = list(packed_matrices(facts))
    assert set(document["packed_bytes"]) == {"int4-g32"}
    assert document["packed_bytes"]["int4-g32"] == {
        kind: sum(m.num_bytes for m in matrices if m.kind == kind) for kind in ("attention", "experts")
    }
    assert document["bytes_by_format"]["I32"] > document["bytes_by_format"]["F16"] > 0
    assert cli.run(["inspect", str(facts.path)]) == 0
    assert "packed int4-g32" in capsys.readouterr().out
