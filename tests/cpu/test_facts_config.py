"""config.json against AutoConfig and the modules of transformers' classes, for every family."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import oracle
from packhorse.core.errors import (
    CorruptFileError,
    PackhorseError,
    RefusedError,
    TokenizerError,
    UnsupportedModelError,
)
from packhorse.core.types import LayerKind
from packhorse.facts.config_json import ARCHITECTURES, config_fields
from packhorse.facts.model import FAMILIES, ModelFacts
from packhorse.facts.read import read_model
from packhorse.facts.weights import expected_params

TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
ABSENT = object()
CAUSAL = {family: name for name, family in ARCHITECTURES.items() if name.endswith("CausalLM")}


def base(family: str, **fields: Any) -> dict[str, Any]:
    """A config.json of nothing but its names, and what is asked for."""
    return {"architectures": [CAUSAL[family]], "model_type": TYPES.get(family, family)} | fields


def small(family: str, **fields: Any) -> dict[str, Any]:
    """A tiny complete config."""
    return base(family) | oracle._COMMON | oracle._CONFIGS[family][2] | fields


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def facts_of(folder: Path, config: dict[str, Any]) -> ModelFacts:
    return read_model(write(folder, config))


def assert_like_autoconfig(folder: Path, facts: ModelFacts) -> None:
    """Every field against what transformers makes of the same file."""
    whole = AutoConfig.from_pretrained(folder)
    config = whole.get_text_config()
    assert facts.family == config.model_type.removesuffix("_text")
    same = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "rms_eps": "rms_norm_eps",
        "bos_id": "bos_token_id",
    }
    for ours, theirs in same.items():
        assert getattr(facts, ours) == getattr(config, theirs), ours
    assert facts.head_dim == (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    if not all(facts.moe_layers):
        assert facts.intermediate_size == config.intermediate_size
    eos = config.eos_token_id
    assert facts.eos_ids == (tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,))
    assert facts.tied == whole.tie_word_embeddings
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    assert list(facts.layer_kinds) == kinds
    assert_rope(facts, config)
    if facts.moe is not None:
        moe = facts.moe
        assert (moe.num_experts, moe.top_k) == (config.num_experts, config.num_experts_per_tok)
        assert moe.expert_dim == config.moe_intermediate_size
        assert moe.shared_dim == getattr(config, "shared_expert_intermediate_size", 0)
        assert moe.norm_topk == getattr(config, "norm_topk_prob", True)
    if facts.delta is not None:
        delta = facts.delta
        assert delta.num_k_heads == config.linear_num_key_heads
        assert delta.num_v_heads == config.linear_num_value_heads
        assert delta.k_head_dim == config.linear_key_head_dim
        assert delta.v_head_dim == config.linear_value_head_dim
        assert delta.conv_kernel == config.linear_conv_kernel_dim
    dtype = whole.dtype or config.dtype
    assert facts.stored_dtype == (str(dtype).removeprefix("torch.") if dtype else None)


def assert_rope(facts: ModelFacts, config: Any) -> None:
    theirs, ours = config.rope_parameters, facts.rope
    assert ours.theta == theirs["rope_theta"]
    assert ours.rotary_dim == int(facts.head_dim * theirs.get("partial_rotary_factor", 1.0))
    assert ours.kind == theirs["rope_type"]
    if ours.kind != "default":
        assert ours.factor == theirs["factor"]
    if ours.kind in ("yarn", "llama3"):
        assert ours.original_context == theirs["original_max_position_embeddings"]
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        assert getattr(ours, name) == theirs.get(name)
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0), ("truncate", True)):
        assert getattr(ours, name) == theirs.get(name, default)
    for name, default in (("low_freq_factor", 1.0), ("high_freq_factor", 4.0)):
        assert getattr(ours, name) == theirs.get(name, default)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_transformers_own(family, tmp_path):
    facts = facts_of(tmp_path, base(family))
    assert_like_autoconfig(tmp_path, facts)
    assert facts.context == AutoConfig.from_pretrained(tmp_path).max_position_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_configs_read_the_same(family, tmp_path):
    oracle.make_model(family).config.save_pretrained(tmp_path)
    facts = read_model(tmp_path)
    assert_like_autoconfig(tmp_path, facts)
    assert facts.context == 8192 and facts.container == "config"


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"head_dim": None, "num_key_value_heads": None, "hidden_size": 96}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"eos_token_id": [2, 7], "bos_token_id": None, "torch_dtype": "bfloat16"}),
        ("llama", {"rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 2}}),
        ("llama", {"rope_scaling": {}, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        (
            "llama",
            {
                "rope_theta": 500000.0,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 2048,
                },
            },
        ),
        ("qwen2", {"head_dim": ABSENT, "num_key_value_heads": None, "use_sliding_window": False}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}),
        ("qwen2", {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0,
                   "original_max_position_embeddings": 8192}}),
        ("qwen2", {"layer_types": ["full_attention"] * 2, "dtype": "float16"}),
        ("qwen3", {"layer_types": ["full_attention"] * 2, "use_sliding_window": True,
                   "max_window_layers": 0}),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}),
        ("qwen3", {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}),
        ("qwen3", {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0,
                   "beta_slow": 2.0, "attention_factor": 1.25, "truncate": False,
                   "mscale": 1.0, "mscale_all_dim": 0.5}}),
        ("qwen3_moe", {"head_dim": ABSENT, "mlp_only_layers": [1], "norm_topk_prob": False}),
        ("qwen3_moe", {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
        ("qwen3_moe", {"num_local_experts": 4, "num_experts": ABSENT}),
        ("qwen3_next", {"mlp_only_layers": [0, 3], "full_attention_interval": 2}),
        ("qwen3_next", {"partial_rotary_factor": 0.5, "rope_theta": 1e7, "attention_bias": True}),
        ("qwen3_5", {"full_attention_interval": 2, "num_hidden_layers": 5, "attention_bias": True}),
        ("qwen3_5", {"layer_types": ["full_attention", "linear_attention"] * 2, "tie_word_embeddings": True}),
        ("qwen3_5", {"output_gate_type": "swish", "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "factor": 2.0,
            "original_max_position_embeddings": 262144, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True}}),
        ("qwen3_5_moe", {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5}}),
    ],
)  # fmt: skip
def test_old_and_new_names(family, fields, tmp_path):
    config = {name: value for name, value in small(family, **fields).items() if value is not ABSENT}
    facts = facts_of(tmp_path, config)
    assert_like_autoconfig(tmp_path, facts)
    assert_same_modules(tmp_path, facts)


def assert_same_modules(folder: Path, facts: ModelFacts) -> None:
    """The model transformers builds from the file has the biases, norms, experts and sizes the facts say."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    names = {name for name, _ in model.named_parameters()}
    leaves = ("self_attn.q_proj.bias", "self_attn.o_proj.bias", "mlp.gate_proj.bias", "q_norm.weight")
    has = [any(name.endswith(leaf) for name in names) for leaf in leaves]
    assert has == [facts.qkv_bias, facts.o_bias, facts.mlp_bias, facts.qk_norm]
    routers = tuple(f"model.layers.{i}.mlp.gate.weight" in names for i in range(facts.num_layers))
    assert facts.moe_layers == routers
    linear = [f"model.layers.{i}.linear_attn.A_log" in names for i in range(facts.num_layers)]
    assert [kind is LayerKind.LINEAR for kind in facts.layer_kinds] == linear
    # parameters() counts a tied head once.
    assert sum(expected_params(facts).values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_nested_configs(family, tmp_path):
    text = small(family, eos_token_id=5, mtp_num_hidden_layers=1)
    del text["architectures"]
    name = next(n for n, f in ARCHITECTURES.items() if f == family and n.endswith("Generation"))
    whole = {
        "architectures": [name],
        "model_type": family,
        "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 32},
        "image_token_id": 7,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    facts = facts_of(tmp_path, whole)
    assert_like_autoconfig(tmp_path, facts)
    assert facts.tied and facts.eos_ids == (5,) and facts.num_mtp_layers == 1
    assert any("vision" in note for note in facts.notes)
    assert facts.attn_gate and facts.norm_offset
    # transformers would tie nothing here, and find no output head in such a file.
    del whole["tie_word_embeddings"]
    text["tie_word_embeddings"] = True
    assert facts_of(tmp_path, whole).tied


def test_real_configs(tmp_path):
    """Dimensions of Qwen3.6-35B-A3B and the window that YaRN gives."""
    rope = {"rope_type": "yarn", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "factor": 2.0,
            "original_max_position_embeddings": 262144}  # fmt: skip
    config = base("qwen3_5_moe", max_position_embeddings=262144, rope_parameters=rope)
    facts = facts_of(tmp_path, config)
    assert (facts.num_full_layers, facts.num_linear_layers, facts.is_hybrid) == (10, 30, True)
    assert [i for i, kind in enumerate(facts.layer_kinds) if kind is LayerKind.FULL] == list(range(3, 40, 4))
    assert (facts.rope.rotary_dim, facts.context) == (64, 524288)
    assert facts_of(tmp_path, config | {"max_position_embeddings": 1_010_000}).context == 1_010_000


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "mistral"}, "mistral"),
        (base("llama", kv_lora_rank=512), "multi-head latent attention"),
        (base("llama", quantization_config={"quant_method": "bitsandbytes"}), "'bitsandbytes'"),
        (base("llama", quantization_config={}), "quant_method of the packed weights is None"),
        (base("llama", hidden_act="gelu"), "'gelu'"),
        (base("qwen3_5", output_gate_type="sigmoid"), "output_gate_type is 'sigmoid'"),
        (base("qwen3_5", attn_output_gate=False), "attn_output_gate is False"),
        (base("llama", rope_scaling={"type": "dynamic", "factor": 2.0}), "'dynamic'"),
        (base("llama", rope_scaling={"rope_type": "longrope", "factor": 2.0}), "'longrope'"),
        (base("llama", rope_parameters={"full_attention": {"rope_theta": 1e4}}), "differ by layer type"),
        (base("llama", partial_rotary_factor=0.5), r"partial_rotary_factor is 0\.5"),
        (base("qwen2", use_sliding_window=True), "layers from 28 on use a sliding window of 4096"),
        (base("qwen3_moe", use_sliding_window=True, sliding_window=128), "sliding window of 128"),
        (base("qwen2", layer_types=["sliding_attention"] * 32), "layer 0 is of kind 'sliding_attention'"),
        (base("qwen3_5", layer_types=["full_attention"] * 31 + ["mamba"]), "layer 31 is of kind 'mamba'"),
    ],
)
def test_unsupported_is_refused_by_name(config, match, tmp_path):
    with pytest.raises(UnsupportedModelError, match=match) as error:
        facts_of(tmp_path, config)
    assert error.value.hint and error.value.exit_code == 4


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "num_attention_heads", 0),
        ("llama", "num_attention_heads", -4),
        ("llama", "num_attention_heads", "32"),
        ("llama", "num_attention_heads", 32.0),
        ("llama", "num_attention_heads", True),
        ("llama", "num_attention_heads", [32]),
        ("llama", "num_key_value_heads", 5),
        ("llama", "num_key_value_heads", 64),
        ("llama", "head_dim", 63),
        ("llama", "hidden_size", 4097),
        ("llama", "num_hidden_layers", 10**6),
        ("llama", "vocab_size", 2**40),
        ("llama", "rms_norm_eps", math.nan),
        ("llama", "rms_norm_eps", math.inf),
        ("llama", "rms_norm_eps", 0),
        ("llama", "rope_theta", -1.0),
        ("llama", "rope_theta", 10**400),
        ("llama", "max_position_embeddings", 0),
        ("llama", "tie_word_embeddings", "yes"),
        ("llama", "eos_token_id", "</s>"),
        ("llama", "eos_token_id", [2, -1]),
        ("llama", "torch_dtype", 16),
        ("llama", "architectures", "LlamaForCausalLM"),
        ("llama", "architectures", [{}]),
        ("llama", "rope_scaling", "yarn"),
        ("llama", "rope_scaling", {"type": "linear"}),
        ("llama", "rope_scaling", {"type": "yarn", "factor": 0.5}),
        ("llama", "rope_scaling",
         {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}),
        ("llama", "quantization_config", "gptq"),
        ("qwen3_moe", "num_experts_per_tok", 129),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_5_moe", "num_experts", 0),
        ("qwen3_moe", "mlp_only_layers", ["0"]),
        ("qwen3_moe", "num_local_experts", 64),
        ("qwen3_5", "linear_num_value_heads", 33),
        ("qwen3_5", "linear_conv_kernel_dim", 1),
        ("qwen3_5", "full_attention_interval", 0),
        ("qwen3_5", "layer_types", ["full_attention"]),
        ("qwen3_5", "partial_rotary_factor", 0.005),
        ("qwen3_5", "rope_parameters", {"partial_rotary_factor": 1.5}),
    ],
)  # fmt: skip
def test_absurd_values_name_field_and_value(family, field, value, tmp_path):
    config = base(family, **{field: value})
    if field == "num_local_experts":
        config["num_experts"] = 32
    with pytest.raises(CorruptFileError) as error:
        facts_of(tmp_path, config)
    inner = {"rope_scaling": ("factor", "rope_scaling", "high_freq"), "rope_parameters": ("partial",)}
    assert any(name in error.value.reason for name in inner.get(field, (field,)))
    assert "config.json" in error.value.reason and error.value.hint


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_in_any_field_is_read_or_refused(family):
    """No field of any type raises anything but the tree's own errors."""
    values = [None, True, 0, 1, -1, 3, 10**18, 10**400, 0.5, math.nan, math.inf, "", "x", [], [1], [None],
              [{}], {}, {"a": 1}, {"rope_type": "yarn"}, {"type": [1]}]  # fmt: skip
    whole = small(family, quantization_config=None, kv_lora_rank=None, layer_types=None, rope_scaling=None,
                  rope_parameters=None, rope_theta=None, text_config=None, mlp_only_layers=None,
                  use_sliding_window=None, sliding_window=None, max_window_layers=None, dtype=None,
                  mtp_num_hidden_layers=None, partial_rotary_factor=None, num_local_experts=None)  # fmt: skip
    refused = 0
    for field in whole:
        for value in values:
            try:
                config_fields(whole | {field: value}, Path("config.json"))
            except PackhorseError:
                refused += 1
    assert refused > len(whole)


def test_files_that_are_no_config(tmp_path):
    file = tmp_path / "config.json"
    for data in (b"", b"{", b"[1]", b"\xff{}", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}", b"null"):
        file.write_bytes(data)
        with pytest.raises(CorruptFileError, match=r"config\.json"):
            read_model(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(RefusedError, match="no model at") as error:
        read_model(tmp_path / "absent")
    assert error.value.hint
    with pytest.raises(RefusedError, match=r"no config\.json and no GGUF"):
        read_model(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedModelError, match="pickle"):
        read_model(tmp_path / "model.pt")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(RefusedError, match="one file of a model") as error:
        read_model(tmp_path / "model.safetensors")
    assert str(tmp_path) in error.value.hint


def test_adapters_are_refused(tmp_path):
    write(tmp_path, small("llama"))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="LoRA") as error:
        read_model(tmp_path)
    assert "Merge" in error.value.hint


def test_generation_config(tmp_path):
    write(tmp_path, small("qwen3", eos_token_id=9))
    values = {"eos_token_id": [8, 9], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True,
              "repetition_penalty": None, "transformers_version": "5"}  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    facts = read_model(tmp_path)
    assert facts.eos_ids == (8, 9)
    assert facts.generation == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}
    assert isinstance(facts.generation["top_k"], int)
    for wrong in ({"temperature": "hot"}, {"temperature": math.nan}, {"top_k": 1.5}, {"do_sample": 1}):
        (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(CorruptFileError, match=r"generation_config\.json"):
            read_model(tmp_path)


def test_chat_templates(tmp_path):
    write(tmp_path, small("qwen3"))
    assert read_model(tmp_path).chat_template is None
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for value, expected in (("one", "one"), (named, "D"), (named[:1], "T"), ([], None), (None, None)):
        config.write_text(json.dumps({"chat_template": value}))
        assert read_model(tmp_path).chat_template == expected
    for wrong in (7, [7], [{"name": "x"}], [{"name": "default", "template": 7}], {"default": "x"}):
        config.write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(TokenizerError, match="chat_template"):
            read_model(tmp_path)
    config.write_text("{")
    with pytest.raises(TokenizerError, match="not JSON"):
        read_model(tmp_path)
    own = tmp_path / "chat_template.jinja"
    own.write_text("own")
    assert read_model(tmp_path).chat_template == "own"
    own.write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match="UTF-8"):
        read_model(tmp_path)


def test_reading_needs_no_torch():
    """The facts of a folder and of a GGUF file are read where torch is not even installed."""
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; import packhorse.facts.read, packhorse.facts.weights"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
