"""GGUF headers and metadata: what they hold, every way they can lie, and how fast they are read."""

import math
import random
import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import converted, metadata_of, random_blocks, write, write_model
from transformers import AutoConfig

import oracle
from packhorse.core.errors import CorruptFileError, PackhorseError, RefusedError, UnsupportedModelError
from packhorse.core.formats import GGUF_TYPES
from packhorse.facts.gguf_header import read_header
from packhorse.facts.model import ModelFacts
from packhorse.facts.read import read_model

WIDTHS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: bytes | str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes | str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def blob(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: int = 0,
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    counts: tuple[int, int] | None = None,
    align: int = 32,
) -> bytes:
    """A GGUF file from parts that may lie."""
    counts = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % align) + bytes(data)


def number(value: int) -> bytes:
    return struct.pack("<I", value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


def test_header_equals_gguf_own_reader(file):
    """Names, shapes, types, places and bytes of every type, and metadata of every kind."""
    kinds = [
        gguf.GGMLQuantizationType(kind) for kind in sorted(GGUF_TYPES) if kind not in (24, 25, 26, 27, 28)
    ]
    raw = {f"t.{kind.name}": (random_blocks(kind, 3, 256), kind) for kind in kinds}
    plain = {f"p.{dtype.__name__}": np.ones((2, 5), dtype) for dtype in
             (np.int8, np.int16, np.int32, np.int64, np.float64, np.float32)}  # fmt: skip
    plain["four"] = np.ones((2, 3, 4, 5), np.float32)
    metadata: dict[str, Any] = {
        "general.architecture": "llama", "general.alignment": 64, "a.bool": True, "a.float": 0.5,
        "a.text": "hé", "a.ints": [1, 2, 3],
        "a.floats": [0.5, 1.5], "a.texts": ["x", "", "ß"], "a.bools": [True, False],
    }  # fmt: skip
    write(file, metadata, plain, raw)
    header = read_header(file)
    assert {key: header.metadata[key] for key in metadata} == metadata
    reader = gguf.GGUFReader(file)
    assert list(header.tensors) == [t.name for t in reader.tensors]
    whole = file.read_bytes()
    for expected in reader.tensors:
        found = header.tensors[expected.name]
        assert found.shape == tuple(int(dim) for dim in reversed(expected.shape))
        assert found.format.gguf_type == expected.tensor_type.value
        assert (found.offset, found.num_bytes) == (expected.data_offset, expected.n_bytes)
        assert whole[found.offset : found.offset + found.num_bytes] == expected.data.tobytes()


def test_every_scalar_and_array_type(file):
    values = {
        0: 200,
        1: -5,
        2: 60000,
        3: -300,
        4: 2**31,
        5: -(2**31),
        6: 0.5,
        7: True,
        10: 2**63,
        11: -(2**63),
        12: 0.1,
    }
    entries = [
        entry(f"s{kind}", kind, struct.pack("<" + WIDTHS[kind], value)) for kind, value in values.items()
    ]
    entries += [
        entry(f"a{kind}", 9, struct.pack("<IQ", kind, 2) + struct.pack("<2" + WIDTHS[kind], value, value))
        for kind, value in values.items()
    ]
    file.write_bytes(blob(entries))
    metadata = read_header(file).metadata
    for kind, value in values.items():
        assert metadata[f"s{kind}"] == value and metadata[f"a{kind}"] == [value, value]


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions(version, file):
    file.write_bytes(blob([entry("k", 8, text("v"))], [tensor("t", [4])], 16, version=version))
    header = read_header(file)
    assert header.metadata == {"k": "v"} and header.tensors["t"].num_bytes == 16


def test_tokens_that_are_not_utf8_keep_their_bytes(file):
    tokens = [b"\xff\xfe", b"ok", b"\xe4\xbd"]
    array = struct.pack("<IQ", 8, 3) + b"".join(text(token) for token in tokens)
    file.write_bytes(
        blob([entry("tokenizer.ggml.tokens", 9, array), entry("general.name", 8, text(b"\xffx"))])
    )
    metadata = read_header(file).metadata
    found = [token.encode("utf-8", "surrogateescape") for token in metadata["tokenizer.ggml.tokens"]]
    assert found == tokens
    assert metadata["general.name"].encode("utf-8", "surrogateescape") == b"\xffx"


LIES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "too few"),
    ("short", b"GGUF" + bytes(19), "too few"),
    ("tensor count", blob(counts=(2**63, 0)), "announces .* tensors"),
    ("entry count", blob(counts=(0, 2**64 - 1)), "announces .* metadata entries"),
    ("key length", blob([struct.pack("<Q", 2**62)], counts=(0, 1), data=64), "metadata key takes"),
    ("key empty", blob([entry("", 4, bytes(4))], data=64), "metadata key takes 0"),
    ("key not utf-8", blob([entry(b"\xff", 4, bytes(4))]), "not UTF-8"),
    ("key twice", blob([entry("a", 4, bytes(4))] * 2), "'a' occurs twice"),
    ("value type", blob([entry("a", 13, bytes(8))], data=64), "type number 13"),
    ("string length", blob([entry("a", 8, struct.pack("<Q", 2**63))], data=64), "takes 9,223,372"),
    ("array length", blob([entry("a", 9, struct.pack("<IQ", 4, 2**40))], data=64), "at most"),
    ("array beyond", blob([entry("a", 9, struct.pack("<IQ", 4, 2**20))], data=64), "are left"),
    ("array of strings", blob([entry("a", 9, struct.pack("<IQ", 8, 2**20))], data=64), "announces 1,048,576"),
    ("string in array", blob([entry("a", 9, struct.pack("<IQQ", 8, 1, 2**60))], data=64), "string 0 of 'a'"),
    ("strings end", blob([entry("a", 9, struct.pack("<IQ", 8, 3) + text("x" * 16))], align=1), "ends after"),
    ("nested arrays", blob([entry("a", 9, struct.pack("<IQIQ", 9, 1, 4, 0))], data=64), "type number 9"),
    ("array type", blob([entry("a", 9, struct.pack("<IQ", 99, 1))], data=64), "type number 99"),
    ("alignment 0", blob([entry("general.alignment", 4, number(0))]), r"general\.alignment is 0"),
    ("alignment 12", blob([entry("general.alignment", 4, number(12))]), r"general\.alignment is 12"),
    ("alignment text", blob([entry("general.alignment", 8, text("32"))]), r"general\.alignment is '32'"),
    ("alignment big", blob([entry("general.alignment", 4, number(2**31))]), r"general\.alignment"),
    ("name twice", blob(tensors=[tensor("t", [1]), tensor("t", [1], offset=32)], data=64), "'t' occurs"),
    ("name empty", blob(tensors=[tensor("", [1])], data=64), "tensor name takes 0"),
    ("name long", blob(tensors=[tensor("x" * 2000, [1])], data=64), "tensor name takes 2,000"),
    ("name not utf-8", blob(tensors=[tensor(b"\xc3", [1])], data=64), "not UTF-8"),
    ("no dims", blob(tensors=[tensor("t", [])], data=64), "0 dimensions"),
    ("five dims", blob(tensors=[tensor("t", [1] * 5)], data=64), "5 dimensions"),
    ("zero dim", blob(tensors=[tensor("t", [4, 0])], data=64), r"shape \[0, 4\]"),
    ("huge dim", blob(tensors=[tensor("t", [2**63])], data=64), "shape"),
    ("huge product", blob(tensors=[tensor("t", [2**40, 2**40])], data=64), "ends at byte"),
    ("half a block", blob(tensors=[tensor("t", [48], kind=8)], data=64), "Q8_0 stores 32"),
    ("off alignment", blob(tensors=[tensor("t", [1], offset=4)], data=64), "multiple of 32"),
    ("beyond the file", blob(tensors=[tensor("t", [17])], data=64), "ends at byte"),
    ("offset beyond", blob(tensors=[tensor("t", [1], offset=2**62)], data=64), "ends at byte"),
    ("overlap", blob(tensors=[tensor("a", [16]), tensor("b", [16], offset=32)], data=128), "inside 'a'"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "match"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_lies_are_refused_before_memory_is_taken(data, match, file):
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=match) as error:
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert "m.gguf" in error.value.reason and error.value.hint


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (blob(magic=b"GGML", data=8), "no GGUF file"),
        (b"PK\x03\x04" + bytes(100), "no GGUF file"),
        (blob(version=1, data=8), "version 1"),
        (blob(version=4, data=8), "version 4"),
        (blob(version=0x03000000, data=8), r"big endian \(version 3\)"),
        (blob(tensors=[tensor("t", [256], kind=23)], data=256), "type IQ4_XS"),
        (blob(tensors=[tensor("t", [32], kind=39)], data=64), "type MXFP4"),
        (blob(tensors=[tensor("t", [32], kind=4)], data=64), "type number 4"),
        (blob(tensors=[tensor("t", [32], kind=2**31)], data=64), "type number 2147483648"),
    ],
)
def test_unsupported_files_are_refused_by_name(data, match, file):
    file.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=match) as error:
        read_header(file)
    assert error.value.hint


def small_file(file: Path) -> bytes:
    model = oracle.make_model(
        "qwen3_5_moe",
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention"] * 2,
        linear_value_head_dim=8,
        linear_key_head_dim=8,
        num_experts=4,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    return write_model(model, file, qwen35moe__rope__scaling__type="none").read_bytes()


def test_damage_anywhere_is_an_error_of_the_tree(file):
    """Damaged copies of a whole model's file: read as another model, or refused with a typed error."""
    good = small_file(file)
    # The data is far larger than the header and holds nothing that is parsed: leave only its first part.
    header_end = min(t.offset for t in read_header(file).tensors.values())
    rng = random.Random(0)
    outcomes = {"read": 0, "refused": 0}
    for trial in range(500):
        traced = trial % 5 == 0
        if traced:
            tracemalloc.start()
        data = bytearray(good[:header_end]) if trial % 4 == 0 else bytearray(good)
        if trial % 4 == 0:
            del data[rng.randrange(header_end) :]
        elif trial % 4 == 1:
            del data[header_end + rng.randrange(len(good) - header_end) :]
        elif trial % 4 == 2:
            for _ in range(rng.randint(1, 5)):
                data[rng.randrange(header_end)] = rng.randrange(256)
        else:
            at = rng.randrange(24, header_end)
            data[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
        file.write_bytes(data)
        try:
            read_model(file)
            outcomes["read"] += 1
        except PackhorseError as error:
            assert error.hint
            outcomes["refused"] += 1
        if traced:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 4_000_000 + 2 * len(good)
    assert outcomes["refused"] > 250 and outcomes["read"] > 0


def test_every_truncation_of_the_header(file):
    good = blob(
        [entry("general.architecture", 8, text("llama")),
         entry("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yz")),
         entry("b", 9, struct.pack("<IQ", 4, 2) + bytes(8))],
        [tensor("t", [4, 2]), tensor("u", [4], offset=32)], 48,
    )  # fmt: skip
    file.write_bytes(good)
    assert len(read_header(file).tensors) == 2
    for length in range(len(good)):
        file.write_bytes(good[:length])
        with pytest.raises(CorruptFileError):
            read_header(file)


def test_a_large_vocabulary_is_read_in_time(file):
    tokens = [f"token{index}" for index in range(248_320)]
    merges = [f"tok{index} en{index}" for index in range(247_587)]
    arrays = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    entries = [
        entry(key, 9, struct.pack("<IQ", 8, len(values)) + b"".join(text(value) for value in values))
        for key, values in arrays.items()
    ]
    types = struct.pack("<IQ", 5, len(tokens)) + struct.pack(f"<{len(tokens)}i", *[1] * len(tokens))
    file.write_bytes(blob([*entries, entry("tokenizer.ggml.token_type", 9, types)]))
    start = time.perf_counter()
    metadata = read_header(file).metadata
    seconds = time.perf_counter() - start
    assert metadata["tokenizer.ggml.tokens"] == tokens and metadata["tokenizer.ggml.merges"] == merges
    assert seconds < 1.5


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_facts_equal_those_of_the_folder(family, tmp_path):
    """A GGUF file and the folder it was made from are the same model."""
    model = oracle.make_model(family)
    oracle.save(model, tmp_path / "folder", fused=True)
    folder = read_model(tmp_path / "folder")
    found = read_model(write_model(model, tmp_path / "m.gguf"))
    own = {"name", "path", "container", "tensors", "metadata", "stored_dtype", "chat_template", "generation",
           "eos_ids", "rms_eps"}  # fmt: skip
    for name in ModelFacts.__dataclass_fields__:
        if name == "intermediate_size" and all(folder.moe_layers):
            continue
        if name not in own:
            assert getattr(found, name) == getattr(folder, name), name
    assert math.isclose(found.rms_eps, folder.rms_eps, rel_tol=1e-6)
    assert found.name == f"Tiny {family}"
    stops = (oracle.VOCAB - 2, oracle.VOCAB - 1)
    assert found.eos_ids == ((2,) if family == "llama" else (2, *stops))
    assert found.chat_template == "{{ messages[0]['content'] }}"
    assert len(found.metadata["tokenizer.ggml.tokens"]) == oracle.VOCAB
    assert found.file_bytes == folder.file_bytes


def test_yarn_and_linear_scaling(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8192}
    model = oracle.make_model("qwen3", rope_parameters=rope)
    oracle.save(model, tmp_path / "folder")
    found = read_model(write_model(model, tmp_path / "m.gguf"))
    assert found.rope == read_model(tmp_path / "folder").rope
    assert (found.rope.kind, found.rope.factor, found.context) == ("yarn", 4.0, 32768)
    plain = oracle.make_model("llama")
    linear = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0}
    assert read_model(write_model(plain, tmp_path / "m.gguf", **linear)).rope.kind == "linear"
    old = read_model(write_model(plain, tmp_path / "m.gguf", llama__rope__scale_linear=2.0)).rope
    assert (old.kind, old.factor) == ("linear", 2.0)


def llama3_factors(config: AutoConfig) -> np.ndarray:
    """What the converter writes into rope_freqs.weight: each frequency before over after the scaling."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    dim, theta = config.head_dim, config.rope_parameters["rope_theta"]
    before = theta ** -(np.arange(0, dim, 2) / dim)
    return (before / LlamaRotaryEmbedding(config).inv_freq.double().numpy()).astype(np.float32)


def test_llama3_scaling_is_recognised_from_its_factors(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    model = oracle.make_model("llama", rope_parameters=rope, max_position_embeddings=131072)
    oracle.save(model, tmp_path / "folder")
    metadata = metadata_of(model.config, oracle.VOCAB)
    factors = llama3_factors(model.config)
    assert factors[0] == 1 and abs(factors[-1] - 32) < 1e-3 and len(set(factors)) > 3
    path = write(tmp_path / "m.gguf", metadata, converted(model) | {"rope_freqs.weight": factors})
    found, folder = read_model(path).rope, read_model(tmp_path / "folder").rope
    assert found.factor == pytest.approx(folder.factor, rel=1e-5)
    assert (found.kind, found.original_context) == ("llama3", 8192)
    assert (found.low_freq_factor, found.high_freq_factor) == (1.0, 4.0)
    ones = {"rope_freqs.weight": np.ones(32, np.float32)}
    assert read_model(write(path, metadata, converted(model) | ones)).rope.kind == "default"
    for wrong in (factors * 1.01, np.full(32, np.nan, np.float32), factors[:16], np.zeros(32, np.float32)):
        write(path, metadata, converted(model) | {"rope_freqs.weight": wrong})
        with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
            read_model(path)


@pytest.mark.parametrize(
    ("family", "changes", "error", "match"),
    [
        ("llama", {"general__architecture": "gemma3"}, UnsupportedModelError, "'gemma3'"),
        ("llama", {"general__type": "adapter"}, UnsupportedModelError, "LoRA"),
        ("llama", {"llama__expert_count": 8}, UnsupportedModelError, "Mixtral"),
        (
            "llama",
            {"llama__attention__sliding_window": 4096},
            UnsupportedModelError,
            "sliding_window is 4096",
        ),
        ("llama", {"llama__attention__value_length": 32}, UnsupportedModelError, "heads of keys have 64"),
        ("llama", {"llama__rope__scaling__type": "longrope"}, UnsupportedModelError, "'longrope'"),
        ("llama", {"llama__rope__scaling__attn_factor": 1.5}, UnsupportedModelError, r"attn_factor is 1\.5"),
        ("llama", {"llama__attention__scale": 0.5}, UnsupportedModelError, r"attention\.scale is 0\.5"),
        ("llama", {"llama__logit_scale": 0.25}, UnsupportedModelError, r"logit_scale is 0\.25"),
        ("llama", {"llama__residual_scale": 0.25}, UnsupportedModelError, r"residual_scale is 0\.25"),
        ("llama", {"llama__embedding_scale": 12.0}, UnsupportedModelError, r"embedding_scale is 12\.0"),
        ("qwen3_moe", {"qwen3moe__expert_gating_func": 2}, UnsupportedModelError, "expert_gating_func is 2"),
        ("llama", {"llama__attention__head_count": 0}, CorruptFileError, "head_count is 0"),
        ("llama", {"llama__attention__head_count_kv": 5}, CorruptFileError, "divisor of head_count 6"),
        ("llama", {"llama__attention__head_count_kv": [2, 2]}, CorruptFileError, r"\[2, 2\]"),
        ("llama", {"llama__attention__key_length": 63}, CorruptFileError, "even"),
        ("llama", {"llama__embedding_length": 64}, CorruptFileError, r"token_embd\.weight is of shape"),
        ("llama", {"llama__block_count": 10**9}, CorruptFileError, "block_count is 1000000000"),
        ("llama", {"llama__rope__freq_base": math.nan}, CorruptFileError, "freq_base is nan"),
        ("llama", {"llama__rope__dimension_count": 32}, CorruptFileError, "dimension_count is 32"),
        ("llama", {"llama__context_length": "long"}, CorruptFileError, "context_length is 'long'"),
        ("llama", {"llama__nextn_predict_layers": 2}, CorruptFileError, "nextn_predict_layers is 2"),
        ("llama", {"tokenizer__ggml__tokens": ["t"] * 194}, CorruptFileError, "194 tokens"),
        ("llama", {"tokenizer__ggml__eos_token_id": -1.0}, CorruptFileError, "eos_token_id"),
        ("qwen3_moe", {"qwen3moe__expert_used_count": 9}, CorruptFileError, "at most expert_count 8"),
        ("qwen3_5", {"qwen35__ssm__time_step_rank": 5}, CorruptFileError, "multiple of ssm.group_count 2"),
        ("qwen3_5", {"qwen35__ssm__inner_size": 100}, CorruptFileError, "multiple of ssm.time_step_rank 6"),
        ("qwen3_5", {"qwen35__full_attention_interval": 0}, CorruptFileError, "full_attention_interval is 0"),
    ],
)
def test_settings_that_are_refused(family, changes, error, match, tmp_path):
    model, path = oracle.shared_checkpoint(family)[0], tmp_path / "m.gguf"
    metadata = metadata_of(model.config, oracle.VOCAB)
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    write(path, metadata, converted(model))
    with pytest.raises(error, match=match) as caught:
        read_model(path)
    assert caught.value.hint


def test_scales_that_change_nothing_are_fine(tmp_path):
    """Head dimension 64: the scale of attention is 1 / 8 anyway."""
    model, path = oracle.shared_checkpoint("llama")[0], tmp_path / "m.gguf"
    metadata = metadata_of(model.config, oracle.VOCAB)
    for attention, other in ((0.125, 1.0), (0.0, 0.0)):
        scales = {f"llama.{name}_scale": other for name in ("logit", "residual", "embedding")}
        write(path, metadata | scales | {"llama.attention.scale": attention}, converted(model))
        assert read_model(path).head_dim == 64


def test_what_is_missing_is_named(tmp_path):
    model, path = oracle.shared_checkpoint("qwen3_5_moe")[0], tmp_path / "m.gguf"
    whole, tensors = metadata_of(model.config, oracle.VOCAB), converted(model)
    optional = ("value_length", "key_length", "interval", "freq_base", "dimension", "vocab_size",
                "feed_forward", "head_count_kv")  # fmt: skip
    for key in whole:
        if key.startswith("qwen35moe.") and not any(part in key for part in optional):
            write(path, {k: v for k, v in whole.items() if k != key}, tensors)
            with pytest.raises(CorruptFileError, match=f"does not say {key}"):
                read_model(path)
    del tensors["token_embd.weight"]
    write(path, whole, tensors)
    with pytest.raises(CorruptFileError, match=r"token_embd\.weight is missing"):
        read_model(path)


def test_older_files_without_expert_sizes(tmp_path):
    """Where the metadata is silent, the tensors say how large experts are."""
    model, path = oracle.shared_checkpoint("qwen3_next")[0], tmp_path / "m.gguf"
    metadata = metadata_of(model.config, oracle.VOCAB)
    metadata = {
        key: value for key, value in metadata.items() if "feed_forward" not in key and "interval" not in key
    }
    facts = read_model(write(path, metadata, converted(model)))
    assert facts.moe is not None and (facts.moe.expert_dim, facts.moe.shared_dim) == (48, 40)
    assert facts.num_full_layers == 1


def test_sampling_defaults_and_notes(tmp_path):
    model = oracle.shared_checkpoint("qwen3")[0]
    sampling = {
        "general__sampling__temp": 0.5,
        "general__sampling__top_k": 20,
        "general__sampling__top_p": 0.25,
    }
    facts = read_model(write_model(model, tmp_path / "m.gguf", **sampling))
    assert facts.generation == {"temperature": 0.5, "top_k": 20, "top_p": 0.25}
    assert facts.notes == () and facts.container == "gguf"


def test_a_folder_with_one_gguf_file(tmp_path):
    model = oracle.shared_checkpoint("llama")[0]
    write_model(model, tmp_path / "m.gguf")
    assert read_model(tmp_path).path == tmp_path / "m.gguf"
    assert read_model(str(tmp_path / "m.gguf")).family == "llama"
    write_model(model, tmp_path / "n.gguf")
    with pytest.raises(RefusedError, match=r"2 GGUF files: m\.gguf, n\.gguf"):
        read_model(tmp_path)
