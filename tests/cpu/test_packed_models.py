"""Models on packed weights from GGUF files, against transformers on what gguf's own code makes of the blocks."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import converted, metadata_of, random_blocks, write, write_model

import oracle
from engines import ask, make_engine, one_pass
from packed_cases import random_codes
from packhorse.core.config import EngineConfig
from packhorse.core.errors import DoesNotFitError, UsageError, WeightsError
from packhorse.core.formats import PACKED
from packhorse.core.units import GIB, MIB, parse_bytes
from packhorse.facts.known import known_model
from packhorse.facts.model import StoredMatrix
from packhorse.facts.packed import packed_matrices
from packhorse.facts.read import read_model
from packhorse.kernels.linear import int4
from packhorse.kernels.linear.int4 import Int4Weight
from packhorse.layers.linear import PackedLinear
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model
from packhorse.models.model import Model
from packhorse.plan import account
from packhorse.plan.size import SPARES, size_engine
from packhorse.quant.packed import PackedTensor, pack

# Every matrix's inputs are a multiple of 256, so that K-quants hold them; heads of 64 and 6 value heads as always.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
WIDE_MOE = {"moe_intermediate_size": 256}
WIDE_HYBRID = {"linear_num_value_heads": 8, "linear_num_key_heads": 2}
IDS = oracle.random_ids(70, seed=3)


def wide_model(family: str, **more):
    fields = dict(WIDE)
    if "moe" in family or family == "qwen3_next":
        fields |= WIDE_MOE
    if family in oracle.HYBRIDS:
        fields |= WIDE_HYBRID
    return oracle.make_model(family, **fields | more)


def load(
    path: Path, *, packed: bool = True, dtype: torch.dtype = torch.float32, exact: bool = False
) -> Model:
    facts = read_model(path)
    return load_model(facts, open_checkpoint(facts), dtype=dtype, packed=packed, exact=exact)


def random_file(model, path: Path, kinds: list[str]) -> Path:
    """The model as a GGUF file whose matrices are random valid blocks of `kinds` in turn, small enough that
    activations stay moderate."""
    config = model.config.get_text_config()
    tensors, raw = converted(model), {}
    turn, by_leaf = itertools.cycle(kinds), {}
    for seed, (name, value) in enumerate(list(tensors.items())):
        matrix = value.ndim >= 2 and "conv1d" not in name and "ffn_gate_inp" not in name
        # Gate and up experts in one format, as converters choose them.
        leaf = name.replace("ffn_up_exps", "ffn_gate_exps")
        kind = by_leaf.setdefault(leaf, gguf.GGMLQuantizationType[next(turn)]) if matrix else None
        if kind is None or value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            continue
        del tensors[name]
        blocks = random_blocks(kind, value.size // value.shape[-1], value.shape[-1], seed=seed)
        scaled(blocks, kind, float(value.std()))
        raw[name] = (blocks.reshape(*value.shape[:-1], -1), kind)
    return write(path, metadata_of(config, model.get_input_embeddings().weight.shape[0]), tensors, raw)


def scaled(blocks: np.ndarray, kind: gguf.GGMLQuantizationType, std: float) -> None:
    """Multiply the fp16 scales of random blocks so that the values have about this deviation."""
    factor = std / gguf.dequantize(blocks, kind).std()
    rows = blocks.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    for at in {"Q4_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "Q2_K": [80, 82]}.get(
        kind.name, [0]
    ):
        halves = rows[:, at : at + 2].copy().view(np.float16) * factor
        rows[:, at : at + 2] = halves.astype(np.float16).view(np.uint8)


def theirs(model, path: Path) -> torch.Tensor:
    """Logits of transformers' model with the weights that gguf's dequantization gives: our unpacked read, which
    other tests hold against gguf to the bit."""
    source = open_checkpoint(read_model(path))
    state = {name: source.read(name).float() for name in source.shapes}
    with torch.no_grad():
        missing = model.load_state_dict(state, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])
    return oracle.oracle_logits(model, IDS)


@pytest.mark.parametrize("family", oracle.FAMILIES)
@pytest.mark.parametrize(
    "kinds", [["Q4_0", "Q8_0"], ["Q4_1"], ["Q4_K", "Q6_K", "Q5_K"], ["Q5_0", "Q4_K", "Q2_K"]]
)
def test_logits_are_those_of_the_dequantized_model(family, kinds, tmp_path):
    model = wide_model(family)
    path = random_file(model, tmp_path / "m.gguf", kinds)
    facts = read_model(path)
    ours = load(path)
    assert oracle.relative_error(one_pass(ours, IDS), theirs(model, path)) < oracle.BOUND
    assert ours.storage_bytes == account.weight_bytes(facts, "fp32", packed=True)
    unpacked = "Q2_K" in kinds
    assert unpacked or ours.storage_bytes < account.weight_bytes(facts, "fp32") / 2


def test_layouts_of_a_mixed_projection(tmp_path):
    """q, k and v in three formats are three pieces; two alike beside each other are one."""
    model = wide_model("qwen3")
    pieces = {}
    for kinds in (["Q4_K", "Q4_K", "Q6_K", "Q4_0"], ["Q8_0"]):
        path = random_file(model, tmp_path / f"{kinds[0]}.gguf", kinds)
        weights = load(path).weights.layer(0).self_attn.qkv_proj
        assert isinstance(weights, PackedLinear)
        pieces[kinds[0]] = [(p.weight.format.name, p.weight.num_rows) for p in weights.pieces]
    assert sum(rows for _, rows in pieces["Q4_K"]) == 256 + 2 * 128 and len(pieces["Q4_K"]) > 1
    assert pieces["Q8_0"] == [("int8-g32", 512)]


def test_odd_rows_and_unpacked_parts(tmp_path):
    """The tiny models' own shapes: heads of gates that fill no row block, matrices whose rows hold no block."""
    for family in ("qwen3_next", "qwen3_5_moe", "qwen2"):
        model = oracle.make_model(family, hidden_size=192)
        path = write_model(model, tmp_path / f"{family}.gguf", quant=gguf.GGMLQuantizationType.Q4_1)
        ours = load(path)
        assert oracle.relative_error(one_pass(ours, IDS), theirs(model, path)) < oracle.BOUND
        assert ours.storage_bytes == account.weight_bytes(read_model(path), "fp32", packed=True)


def test_experts_are_one_tensor_each_and_contiguous(tmp_path):
    path = random_file(wide_model("qwen3_moe"), tmp_path / "m.gguf", ["Q4_K"])
    experts = load(path).weights.layer(1).mlp.experts
    for matrix, rows in ((experts.gate_up_proj, 512), (experts.down_proj, 256)):
        assert isinstance(matrix, PackedTensor)
        assert matrix.shape == (8, rows, 256) and matrix.data.is_contiguous()


def test_experts_in_two_formats_are_unpacked_and_counted_so(tmp_path):
    model = wide_model("qwen3_moe")
    tensors = converted(model)
    raw = {}
    for part, kind in (("gate", "Q4_0"), ("up", "Q8_0")):
        name = f"blk.0.ffn_{part}_exps.weight"
        quant = gguf.GGMLQuantizationType[kind]
        raw[name] = (gguf.quantize(tensors.pop(name), quant), quant)
    path = write(tmp_path / "m.gguf", metadata_of(model.config, oracle.VOCAB), tensors, raw)
    assert not list(packed_matrices(read_model(path)))
    ours = load(path)
    assert isinstance(ours.weights.layer(0).mlp.experts.gate_up_proj, torch.Tensor)
    assert ours.storage_bytes == account.weight_bytes(read_model(path), "fp32", packed=True)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "llama"])
def test_exact_mode_changes_no_bit(family, tmp_path):
    """Chunks and single tokens give what one pass gives, on packed bits too."""
    model = load(random_file(wide_model(family), tmp_path / "m.gguf", ["Q4_K", "Q8_0"]), exact=True)
    prompt = oracle.random_ids(150, seed=5)
    found = []
    for chunk_len in (64, 256):
        engine = make_engine(model, chunk_len=chunk_len)
        tokens, _ = ask(engine, prompt, max_tokens=8)
        found.append((tokens, dict(engine.runner.logits)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][key]) for key, value in found[0][1].items())


def test_16_bit_products_lose_no_more_than_unpacked_weights(tmp_path):
    path = random_file(wide_model("qwen3"), tmp_path / "m.gguf", ["Q4_K", "Q6_K"])
    exact = one_pass(load(path), IDS)
    for dtype in (torch.bfloat16, torch.float16):
        packed, plain = (
            oracle.rms_error(one_pass(load(path, packed=packed, dtype=dtype), IDS), exact)
            for packed in (True, False)
        )
        assert packed < 1.5 * plain < 0.08


@pytest.mark.parametrize(
    ("kind", "places"),
    [("Q4_0", [0]), ("Q4_1", [0, 2]), ("Q5_0", [0]), ("Q5_1", [0, 2]), ("Q8_0", [0]), ("Q4_K", [0, 2]),
     ("Q5_K", [0, 2]), ("Q6_K", [208])],
)  # fmt: skip
def test_scales_that_are_no_numbers_are_refused(kind, places, tmp_path):
    path = random_file(wide_model("llama"), tmp_path / "m.gguf", [kind])
    tensor = read_model(path).tensors["blk.1.ffn_up.weight"]
    good = path.read_bytes()
    for at, value in itertools.product(places, (np.nan, np.inf, -np.inf)):
        place = tensor.offset + 3 * tensor.format.block_bytes + at
        path.write_bytes(good[:place] + np.array([value], np.float16).tobytes() + good[place + 2 :])
        with pytest.raises(WeightsError, match=r"ffn_up.*1 blocks whose scales are not finite") as error:
            load(path)
        assert error.value.hint
    path.write_bytes(good)
    load(path)


def test_what_is_chosen(tmp_path):
    """auto: packed on a card, on a CPU only where memory demands it; the notes say which and what it takes."""
    path = write_model(wide_model("qwen3"), tmp_path / "m.gguf", quant=gguf.GGMLQuantizationType.Q8_0)
    facts = read_model(path)
    plain, packed = (account.weight_bytes(facts, "fp32", packed=p) for p in (False, True))

    def sized(weights: str, available: int = 8 * GIB, device: str = "cpu"):
        return size_engine(
            facts, EngineConfig(weights=weights, context=64, sequences=1, device=device), "fp32", available
        )

    roomy = sized("auto")
    assert not roomy.packed and roomy.weight_bytes == plain and "unpacked to fp32" in roomy.notes[0]
    assert sized("auto", device="cuda").packed
    kept = sized("packed")
    assert (
        kept.packed
        and kept.weight_bytes == packed
        and kept.notes[0].startswith("weights stay packed: int8-g32")
    )
    others = roomy.total_bytes - plain
    tight = sized("auto", others + 512 * MIB + (plain + packed) // 2)
    assert tight.packed and tight.weight_bytes == packed
    assert not sized("unpacked", device="cuda").packed
    bare = dataclasses.replace(facts, tensors={})
    with pytest.raises(UsageError, match="holds none that can stay packed"):
        size_engine(bare, EngineConfig(weights="packed"), "fp32", 8 * GIB)
    with pytest.raises(UsageError, match="weights 'half' is not known"):
        EngineConfig(weights="half")


def int4_error(packed: PackedTensor, x: torch.Tensor) -> float:
    """Of torch's int4 product, over the largest value of the reference in fp32."""
    want = x.float() @ packed.dequantize().T
    return float((int4.linear(x, int4.from_packed(packed)).float() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("name", ["int4-g32", "int4z-g64", "int4m-g32", "q4_k", "int4-g128"])
@pytest.mark.parametrize("rows", [16, 80, 272])
def test_int4_product_of_torch(name, rows):
    """Near the reference, for the formats that it holds; bf16 scales and sums lose a few parts in a thousand."""
    form = PACKED[name]
    assert form.has_int4_product(rows, 512)
    codes = random_codes(form, rows, 512, rows)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert int4_error(pack(form, codes), x) < 0.02
    wrong = codes._replace(codes=codes.codes ^ 1)
    assert float((pack(form, wrong).dequantize() - pack(form, codes).dequantize()).abs().max()) > 0


def test_what_torchs_product_cannot_hold():
    for name, rows, cols in (
        ("int4-g16", 64, 64),
        ("int5-g32", 64, 64),
        ("int4-g32", 24, 64),
        ("int4-g64", 64, 96),
    ):
        assert not PACKED[name].has_int4_product(rows, cols)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5"])
def test_a_bf16_model_on_a_cpu_takes_torchs_product(family, tmp_path):
    path = random_file(wide_model(family), tmp_path / "m.gguf", ["Q4_K", "Q8_0"])
    facts = read_model(path)
    model = load(path, dtype=torch.bfloat16)
    assert model.storage_bytes == account.weight_bytes(facts, "bf16", packed=True, cpu=True)
    layer = model.weights.layer(1)
    if family == "qwen3_moe":
        assert isinstance(layer.mlp.experts.gate_up_proj, Int4Weight | PackedTensor)
    else:
        kinds = {
            type(piece.weight)
            for part in (layer.mlp.gate_up_proj, layer.mlp.down_proj)
            for piece in part.pieces
        }
        assert Int4Weight in kinds
    exact = one_pass(load(path), IDS)
    plain = oracle.rms_error(one_pass(load(path, packed=False, dtype=torch.bfloat16), IDS), exact)
    assert oracle.rms_error(one_pass(model, IDS), exact) < 3 * plain < 0.3


def test_experts_give_way_to_a_cap(tmp_path):
    """On a card with less and less memory: first all stays, then slots shrink, then it is refused with the least cap
    that works; no plan exceeds its cap, and what is not on the card is counted in host memory."""
    model = wide_model("qwen3_moe", num_hidden_layers=6, num_experts=16)
    facts = read_model(write_model(model, tmp_path / "m.gguf", quant=gguf.GGMLQuantizationType.Q8_0))
    config = EngineConfig(context=256, sequences=2, kv="fp8", dtype="fp16", device="cuda")
    whole = size_engine(facts, config, "fp16", 8 * GIB)
    assert whole.packed and whole.expert_slots is None and whole.pinned_bytes == 0
    experts = account.packed_expert_bytes(facts)
    embedding = account.embedding_bytes(facts, "fp16", packed=True)
    assert experts > 0 and whole.host_bytes == embedding
    assert whole.weight_bytes == account.weight_bytes(facts, "fp16", packed=True) - embedding
    block = experts // (sum(facts.moe_layers) * facts.moe.num_experts)
    # With room for one page of each sequence less than everything: two pages are what the context needs.
    cap, last = whole.device_bytes - whole.kv_bytes + 4 * whole.page_bytes - 1, None
    while True:
        try:
            sizes = size_engine(facts, config, "fp16", cap, host_bytes=embedding + experts)
        except DoesNotFitError as error:
            least = error.asked
            break
        assert sizes.device_bytes <= cap < sizes.device_bytes + block + sizes.page_bytes * 8
        assert sizes.pinned_bytes == experts and sizes.host_bytes == experts + embedding
        assert sizes.num_pages * 64 == 256 and "routed experts" in sizes.notes[-1]
        assert last is None or last > sizes.expert_slots
        last, cap = sizes.expert_slots, cap - block
    assert last is not None
    assert size_engine(facts, config, "fp16", least).expert_slots == 2 * sum(facts.moe_layers) * SPARES
    with pytest.raises(DoesNotFitError, match="host memory"):
        size_engine(facts, config, "fp16", least, host_bytes=experts)


@pytest.mark.parametrize("context", [None, 8192])
def test_the_cap_that_a_refusal_names_is_enough(context):
    """True shapes: from any smaller cap, in bytes and as it is printed, also where residuals of a sweep want room."""
    facts, form = known_model("qwen3.6-35b-a3b"), PACKED["int4-g128"]
    num, inner, hidden = facts.moe.num_experts, facts.moe.expert_dim, facts.hidden_size
    shapes = {"gate_up_proj": (num, 2 * inner, hidden), "down_proj": (num, hidden, inner)}
    stored = {
        f"model.layers.{layer}.mlp.experts.{name}": StoredMatrix(name, form, shape, "ours", {}, 128)
        for layer in range(facts.num_layers)
        for name, shape in shapes.items()
    }
    facts = dataclasses.replace(facts, stored=stored)
    config = EngineConfig(context=context, sequences=1, kv="fp8", device="cuda")
    refused = 0
    for cap in range(6 * GIB, 10 * GIB, 8 * MIB):
        try:
            size_engine(facts, config, "fp16", cap)
        except DoesNotFitError as error:
            refused += 1
            assert error.asked > cap
            sizes = size_engine(facts, config, "fp16", error.asked)
            assert sizes.expert_slots >= 2 * facts.num_layers * SPARES and sizes.device_bytes <= error.asked
            printed = error.hint.removeprefix("Give --vram of at least ").partition(",")[0]
            assert error.asked <= parse_bytes(printed) < error.asked + GIB // 50
    assert 50 < refused < 500
