"""Weights by name from folders and GGUF files, against the models they were saved from and transformers."""

import json
import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_files import converted, metadata_of, random_blocks, write, write_model
from safetensors.torch import save_file

import oracle
from packhorse.core.errors import CorruptFileError, RefusedError, UnsupportedModelError, WeightsError
from packhorse.core.formats import FORMATS
from packhorse.facts.model import TensorFacts
from packhorse.facts.read import read_model
from packhorse.models import raw
from packhorse.models.checkpoint import open_checkpoint

FAMILIES = oracle.FAMILIES


@pytest.fixture(scope="module")
def models():
    return {family: oracle.make_model(family) for family in FAMILIES}


def all_of(path: Path) -> dict[str, torch.Tensor]:
    source = open_checkpoint(read_model(path))
    found = {name: source.read(name) for name in source.shapes}
    assert {name: tuple(value.shape) for name, value in found.items()} == dict(source.shapes)
    return found


def without_tied_head(model) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    if model.config.get_text_config().tie_word_embeddings:
        state.pop("lm_head.weight")
    return state


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_folder_gives_every_tensor(family, shards, models, tmp_path):
    oracle.save(models[family], tmp_path, fused=True, shards=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    found, state = all_of(tmp_path), without_tied_head(models[family])
    assert set(found) == set(state)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_folder_gives_experts_as_stored(models, tmp_path):
    model = models["qwen3_moe"]
    oracle.save(model, tmp_path)
    found, state = all_of(tmp_path), model.state_dict()
    gate_up = state["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(found["model.layers.1.mlp.experts.2.gate_proj.weight"], gate_up[2].chunk(2)[0])
    assert torch.equal(found["model.layers.1.mlp.experts.2.up_proj.weight"], gate_up[2].chunk(2)[1])
    assert "model.layers.1.mlp.experts.gate_up_proj" not in found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_folder_keeps_the_stored_type(dtype, models, tmp_path):
    oracle.save(models["llama"], tmp_path)
    tensors = {name: value.to(dtype) for name, value in without_tied_head(models["llama"]).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    found = all_of(tmp_path)
    assert all(value.dtype == dtype for value in found.values())
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[name].float(), tensors[name].float())


def test_memory_of_a_tensor_is_aligned_and_its_own(models, tmp_path):
    oracle.save(models["qwen2"], tmp_path)
    source = open_checkpoint(read_model(tmp_path))
    name = "model.layers.0.self_attn.q_proj.bias"
    first = source.read(name)
    assert first.data_ptr() % 64 == 0
    first.zero_()
    assert source.read(name).abs().sum() > 0


def nested(tmp_path: Path, model) -> dict[str, torch.Tensor]:
    """A folder as Qwen3_5ForConditionalGeneration writes it, with vision and MTP tensors beside the text."""
    text = json.loads((tmp_path / "config.json").read_text())
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text | {"mtp_num_hidden_layers": 1},
        "vision_config": {"depth": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        name if name.startswith("lm_head") else name.replace("model.", "model.language_model.", 1): value
        for name, value in model.state_dict().items()
    }
    more = {
        "model.visual.blocks.0.attn.qkv.weight": torch.ones(6, 2),
        "mtp.fc.weight": torch.ones(4, 8),
        "mtp.layers.0.input_layernorm.weight": torch.ones(4),
    }
    save_file(tensors | more, tmp_path / "model.safetensors")
    return tensors


def test_nested_names_are_the_text_models(models, tmp_path):
    model = models["qwen3_5"]
    oracle.save(model, tmp_path)
    nested(tmp_path, model)
    facts = read_model(tmp_path)
    assert facts.num_mtp_layers == 1
    assert any("2 tensors (144 B) of multi-token prediction" in note for note in facts.notes)
    assert any("1 tensors (48 B) of the vision part" in note for note in facts.notes)
    found, state = all_of(tmp_path), model.state_dict()
    assert set(found) == set(state)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_two_names_of_one_tensor_are_refused(models, tmp_path):
    model = models["qwen3_5"]
    oracle.save(model, tmp_path)
    tensors = nested(tmp_path, model)
    tensors["model.norm.weight"] = torch.ones(96)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"both the tensor 'model\.norm\.weight'"):
        open_checkpoint(read_model(tmp_path))


def test_old_rotary_frequencies_are_left_out(models, tmp_path):
    model = models["llama"]
    oracle.save(model, tmp_path)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(without_tied_head(model) | more, tmp_path / "model.safetensors")
    assert set(all_of(tmp_path)) == set(without_tied_head(model))


def test_file_cut_after_opening(models, tmp_path):
    oracle.save(models["llama"], tmp_path)
    source = open_checkpoint(read_model(tmp_path))
    file = tmp_path / "model.safetensors"
    with file.open("rb+") as stream:
        stream.truncate(file.stat().st_size - 5)
    with pytest.raises(CorruptFileError, match="ends 5 bytes before the end"):
        for name in source.shapes:
            source.read(name)
    file.unlink()
    with pytest.raises(RefusedError, match="cannot be read"):
        source.read(next(iter(source.shapes)))


def test_large_tensors_are_read_in_parts(tmp_path, monkeypatch):
    """By several threads, to the same bytes and with the same refusals; the first byte that is missing counts."""
    asked = []
    preadv = os.preadv

    def short(file, buffers, offset):
        asked.append(len(buffers[0]))
        return preadv(file, [buffers[0][:300]], offset)  # as a system may

    monkeypatch.setattr(os, "preadv", short)
    monkeypatch.setattr(raw, "LARGE_BYTES", 10_000)
    monkeypatch.setattr(raw, "PART_BYTES", 1000)
    file = tmp_path / "bytes"
    data = np.random.default_rng(1).integers(0, 256, 12_345, np.uint8)
    file.write_bytes(data.tobytes())
    for size in (9_999, 10_000, 12_222):
        asked.clear()
        tensor = TensorFacts("x", (size,), FORMATS["U8"], file, 123)
        assert torch.equal(raw.read_plain(tensor), torch.from_numpy(data[123 : 123 + size]))
        assert max(asked) == (size if size < 10_000 else 1000)
    os.truncate(file, 12_345 - 2_345)
    with pytest.raises(CorruptFileError, match="ends 2,345 bytes before the end of the tensor 'x'"):
        raw.read_raw(tensor)
    file.unlink()
    with pytest.raises(RefusedError, match="cannot be read: No such file"):
        raw.read_raw(tensor)


def test_where_nothing_more_is_pinned_plain_memory_is_sent_from(monkeypatch):
    """Experts that are being pinned may take all that the system allows."""
    empty, asked = torch.empty, []

    def refuse(*size, pin_memory=False, **options):
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    halves = raw._halves()
    assert asked == [True, False] and halves.shape == (2, raw.STAGE_BYTES) and halves.dtype == torch.uint8


def test_config_without_weights_has_no_checkpoint(models, tmp_path):
    models["llama"].config.save_pretrained(tmp_path)
    facts = read_model(tmp_path)
    assert facts.container == "config"
    with pytest.raises(RefusedError, match="holds no weights"):
        open_checkpoint(facts)


def test_types_torch_does_not_have_are_refused(models, tmp_path):
    oracle.save(models["llama"], tmp_path)
    save_file({"x": torch.ones(2, dtype=torch.uint16)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="U16"):
        all_of(tmp_path)


def assert_undone(found: dict[str, torch.Tensor], model) -> None:
    """Every tensor as it was; sums with 1 and exp, log lose at most rounding."""
    state = without_tied_head(model)
    assert set(found) == set(state)
    hybrid = hasattr(model.config.get_text_config(), "linear_num_key_heads")
    for name, value in state.items():
        changed = name.endswith("A_log") or (hybrid and "norm.weight" in name)
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6 if changed else 0.0, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_undoes_the_converter(family, models, tmp_path):
    found = all_of(write_model(models[family], tmp_path / "m.gguf"))
    assert_undone(found, models[family])


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "llama"])
def test_gguf_transforms_are_not_their_own_inverse(family, models):
    """The files of these tests would not be undone by leaving them alone or by converting twice."""
    model = models[family]
    plain, changed = model.state_dict(), converted(model)
    ours, theirs = {
        "qwen3_5": ("model.layers.0.linear_attn.out_proj.weight", "blk.0.ssm_out.weight"),
        "qwen3_next": ("model.layers.0.linear_attn.in_proj_qkvz.weight", "blk.0.attn_qkv.weight"),
        "llama": ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
    }[family]
    rows = changed[theirs].shape[0]
    assert not np.array_equal(plain[ours].numpy()[:rows], changed[theirs])
    config = model.config
    if family == "qwen3_5":
        assert config.linear_num_key_heads >= 2
        assert config.linear_num_value_heads // config.linear_num_key_heads != config.linear_num_key_heads


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "qwen3_next"])
def test_gguf_equals_transformers_own_load(family, models, tmp_path):
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < (5, 24) and family.startswith("qwen3_5"):
        pytest.skip(f"transformers {transformers.__version__} does not load this architecture from GGUF")
    write_model(models[family], tmp_path / "m.gguf")
    # With the config given: from these files transformers reads no head_dim for qwen2 and qwen3, and no
    # expert size for qwen3_moe.
    loader, config = type(models[family]), models[family].config
    loaded = loader.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32, config=config)
    found = all_of(tmp_path / "m.gguf")
    expected = loaded.state_dict()
    if "lm_head.weight" not in found:
        assert torch.equal(expected.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gguf_packed_blocks_come_as_fp32(tmp_path):
    model = oracle.make_model("qwen3_5", hidden_size=128)
    kind = gguf.GGMLQuantizationType.Q8_0
    found = all_of(write_model(model, tmp_path / "m.gguf", quant=kind))
    state = model.state_dict()
    assert set(found) == set(state)
    assert all(value.dtype == torch.float32 for value in found.values())
    # 8 bits a value and a scale for 32: half a step of the largest value in a group.
    for name in state:
        limit = 1e-6 if state[name].ndim == 1 else state[name].abs().max() / 127
        assert (found[name] - state[name]).abs().max() <= limit, name
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(found[name], state[name])


def test_gguf_k_quants_equal_gguf(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    tensors = converted(transformers.LlamaForCausalLM(config))
    kinds = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "BF16"]
    names = [
        name
        for name, value in tensors.items()
        if value.ndim == 2 and "attn_q" not in name and "attn_k" not in name
    ]
    raw, expected = {}, {}
    for seed, name in enumerate(names):
        kind = gguf.GGMLQuantizationType[kinds[seed % len(kinds)]]
        blocks = random_blocks(kind, *tensors.pop(name).shape, seed=seed)
        raw[name], expected[name] = (blocks, kind), gguf.dequantize(blocks, kind)
    path = write(tmp_path / "m.gguf", metadata_of(config, 256), tensors, raw)
    found = all_of(path)
    to_ours = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
               "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}  # fmt: skip
    assert len(raw) == 6
    for name, values in expected.items():
        ours = "model.embed_tokens.weight"
        if name != "token_embd.weight":
            ours = f"model.layers.0.{to_ours[name.split('.')[2]]}.weight"
        assert torch.equal(found[ours].float(), torch.from_numpy(values)), name
        assert found[ours].dtype == (torch.bfloat16 if raw[name][1].name == "BF16" else torch.float32)


def test_gguf_fused_gate_up_and_old_qkvz(models, tmp_path):
    """Newer files may keep gate and up together; older qwen3next files keep in_proj_qkvz as it was."""
    model = models["qwen3_next"]
    tensors = converted(model)
    for layer in range(4):
        pair = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(pair, axis=1)
        if layer != 3:
            for part in ("attn_qkv", "attn_gate"):
                del tensors[f"blk.{layer}.{part}.weight"]
            whole = model.state_dict()[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
            tensors[f"blk.{layer}.ssm_in.weight"] = whole.numpy()
    path = write(tmp_path / "m.gguf", metadata_of(model.config, oracle.VOCAB), tensors)
    assert_undone(all_of(path), model)


def test_gguf_leaves_out_mtp_blocks_and_keeps_unknown_names(models, tmp_path):
    model = models["qwen3_5"]
    tensors = converted(model)
    tensors["blk.4.attn_norm.weight"] = np.ones(96, np.float32)
    tensors["blk.4.nextn.eh_proj.weight"] = np.ones((96, 192), np.float32)
    tensors["blk.1.strange.weight"] = np.ones(4, np.float32)
    metadata = metadata_of(model.config, oracle.VOCAB)
    metadata |= {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    path = write(tmp_path / "m.gguf", metadata, tensors)
    facts = read_model(path)
    assert (facts.num_layers, facts.num_mtp_layers) == (4, 1)
    assert facts.notes == ("2 tensors (72.38 KiB) of multi-token prediction are not used yet.",)
    found = all_of(path)
    assert set(found) - set(model.state_dict()) == {"blk.1.strange.weight"}


@pytest.mark.parametrize(
    ("family", "name", "change", "match"),
    [
        ("qwen3_moe", "blk.0.ffn_up_exps.weight", None, "ffn_up_exps.weight is missing"),
        ("qwen3_moe", "blk.0.ffn_gate_exps.weight", None, "ffn_gate_exps.weight is missing"),
        ("qwen3_moe", "blk.0.ffn_up_exps.weight", (8, 24, 96), r"of shape \[8, 24, 96\]"),
        ("qwen3_next", "blk.0.attn_gate.weight", None, "attn_gate.weight is missing"),
        ("qwen3_next", "blk.0.attn_qkv.weight", None, "attn_qkv.weight is missing"),
        ("qwen3_next", "blk.0.attn_gate.weight", (96, 96), "metadata ask for another"),
        ("qwen3_5", "blk.0.ssm_a", (5,), "metadata ask for another"),
        ("qwen3_5", "blk.0.ssm_conv1d.weight", (320, 3), "metadata ask for another"),
        ("qwen3_5", "blk.0.ssm_out.weight", (96, 96), "metadata ask for another"),
        ("qwen3_5", "blk.0.attn_qkv.weight", (64, 96), "metadata ask for another"),
        ("llama", "blk.0.attn_q.weight", (96, 96), "metadata ask for another"),
    ],
)
def test_gguf_tensors_that_cannot_be_undone_are_refused(family, name, change, match, models, tmp_path):
    model = models[family]
    tensors = converted(model)
    del tensors[name]
    if change is not None:
        tensors[name] = np.ones(change, np.float32)
    path = write(tmp_path / "m.gguf", metadata_of(model.config, oracle.VOCAB), tensors)
    facts = read_model(path)
    with pytest.raises(WeightsError, match=match) as error:
        open_checkpoint(facts)
    assert error.value.hint


def test_split_gguf(models, tmp_path):
    """Parts are read as one; a missing part and a part that is not the first are refused."""
    model = models["qwen3"]
    tensors, metadata = converted(model), metadata_of(model.config, oracle.VOCAB)
    names = list(tensors)
    halves = [names[::2], names[1::2]]
    for number, half in enumerate(halves, start=1):
        split = {"split.no": number - 1, "split.count": 2, "split.tensors.count": len(names)}
        own = metadata | split if number == 1 else {"general.architecture": "qwen3"} | split
        write(tmp_path / f"m-{number:05d}-of-00002.gguf", own, {name: tensors[name] for name in half})
    first, second = (tmp_path / f"m-{number:05d}-of-00002.gguf" for number in (1, 2))
    assert_undone(all_of(first), model)
    assert_undone(all_of(tmp_path), model)
    with pytest.raises(RefusedError, match="one of 2 parts"):
        read_model(second)
    shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(RefusedError, match="one of 2 parts"):
        read_model(tmp_path / "renamed.gguf")
    shutil.copy(first, second)
    with pytest.raises(CorruptFileError, match=r"is in m-00001-of-00002\.gguf and in m-00002"):
        read_model(first)
    second.unlink()
    with pytest.raises(CorruptFileError, match=r"m-00002-of-00002\.gguf is missing"):
        read_model(first)
