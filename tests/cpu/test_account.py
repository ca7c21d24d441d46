"""Bytes and values by formula: against published figures, the files, the loader, and a machine of files."""

from pathlib import Path

import psutil
import pytest
from gguf_files import write_model

import oracle
from packhorse.core import cost
from packhorse.facts import hardware
from packhorse.facts.config_json import config_fields
from packhorse.facts.model import ModelFacts
from packhorse.facts.read import read_model
from packhorse.facts.weights import CLASSES, expected_params, weight_classes
from packhorse.models.loader import model_params
from packhorse.plan import account


def facts_of(architecture: str, **config: object) -> ModelFacts:
    fields = config_fields({"architectures": [architecture], **config}, Path("config.json"))
    return ModelFacts(name="", path=Path("."), container="config", **fields)


QWEN_35B = facts_of("Qwen3_5MoeForCausalLM", max_position_embeddings=262144)
QWEN_27B = facts_of(
    "Qwen3_5ForCausalLM", hidden_size=5120, intermediate_size=17408, num_hidden_layers=64,
    num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48,
)  # fmt: skip
QWEN_32B = facts_of(
    "Qwen3ForCausalLM", hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
    num_attention_heads=64, num_key_value_heads=8,
)  # fmt: skip


def test_values_of_the_published_models():
    """Counts of the official checkpoints, to the value."""
    assert expected_params(QWEN_35B) == {
        "embeddings": 508_559_360,
        "lm_head": 508_559_360,
        "attention": 272_634_880,
        "delta_net": 1_011_553_920,
        "router": 20_971_520,
        "experts": 32_212_254_720,
        "shared_expert": 125_911_040,
        "norms": 165_888,
    }
    assert sum(expected_params(QWEN_35B).values()) == 34_660_610_688
    assert expected_params(QWEN_27B) == {
        "embeddings": 1_271_398_400,
        "lm_head": 1_271_398_400,
        "attention": 1_677_729_792,
        "delta_net": 5_562_051_072,
        "mlp": 17_112_760_320,
        "norms": 660_480,
    }
    assert sum(expected_params(QWEN_27B).values()) == 26_895_998_464
    assert sum(expected_params(QWEN_32B).values()) == 32_762_123_264


def test_kv_and_state_of_the_published_models():
    models = (QWEN_35B, QWEN_27B, QWEN_32B)
    assert [account.kv_token_bytes(facts, "fp16") for facts in models] == [20480, 65536, 262144]
    assert account.kv_token_bytes(QWEN_35B, "fp32") == 40960
    assert account.kv_token_bytes(QWEN_35B, "bf16") * 131072 == 2.5 * 1024**3
    assert account.kv_page_bytes(QWEN_35B, "bf16", 64) == 64 * 2048
    assert account.kv_page_bytes(QWEN_35B, "bf16", 64) * QWEN_35B.num_full_layers == 64 * 20480
    assert account.snapshot_bytes(QWEN_35B, "bf16") == 62_914_560 + 1_474_560
    assert account.snapshot_bytes(QWEN_27B, "bf16") == 150_994_944 + 2_949_120
    assert account.snapshot_bytes(QWEN_27B, "fp32") == 150_994_944 + 2 * 2_949_120
    assert account.snapshot_bytes(QWEN_32B, "bf16") == 0
    # One snapshot takes as much as the KV of 3,072 tokens.
    assert cost.recurrent_state_bytes(32, 128, 128) * 30 == 3072 * 20480


def prefill_flops(facts: ModelFacts, tokens: int) -> int:
    """Reading a prompt of a model whose layers all have experts, with the logits of its last token."""
    H, delta, moe = facts.hidden_size, facts.delta, facts.moe
    heads, kv_heads, D = facts.num_heads, facts.num_kv_heads, facts.head_dim
    q_rows = 2 * heads * D if facts.attn_gate else heads * D
    full = cost.linear_flops(tokens, H, q_rows + 2 * kv_heads * D) + cost.linear_flops(tokens, heads * D, H)
    full += cost.causal_attention_flops(0, tokens, heads, D)
    in_rows = delta.conv_dim + delta.value_dim + 2 * delta.num_v_heads
    linear = cost.linear_flops(tokens, H, in_rows) + cost.linear_flops(tokens, delta.value_dim, H)
    linear += cost.conv_flops(tokens, delta.conv_dim, delta.conv_kernel)
    linear += cost.delta_rule_flops(tokens, delta.num_v_heads, delta.k_head_dim, delta.v_head_dim)
    inner = moe.top_k * moe.expert_dim + moe.shared_dim
    experts = 3 * cost.linear_flops(tokens, H, inner) + cost.linear_flops(tokens, H, moe.num_experts + 1)
    layers = facts.num_full_layers * full + facts.num_linear_layers * linear + facts.num_layers * experts
    return layers + cost.linear_flops(1, H, facts.vocab_size)


def test_operations_of_the_published_model():
    """By hand: 2 x 2,437,870,208 weights a token, 2 N^2 x 4,096 a layer of causal attention, 163,840 a token and
    head of the delta rule, the last token's logits. In 1e15 at 32K to 512K tokens."""
    for thousands, expected in ((32, 0.253), (128, 2.067), (256, 6.949), (512, 25.157)):
        found = prefill_flops(QWEN_35B, thousands * 1024)
        assert found / 1e15 == pytest.approx(expected, abs=6e-4, rel=1e-4)
    # A published count, 52.098e12, takes the whole square of attention, and the delta rule step by step.
    N, per_layer = 8192, (16, 256)
    masked = cost.attention_flops(N, N, *per_layer) - cost.causal_attention_flops(0, N, *per_layer)
    steps = 9 * 128 * 128 * N * 32 - cost.delta_rule_flops(N, 32, 128, 128)
    whole = prefill_flops(QWEN_35B, N) + 10 * masked + 30 * steps
    assert whole == pytest.approx(52.098e12, rel=2e-4)


def test_causal_attention_is_the_sum_of_its_parts():
    whole = cost.causal_attention_flops(0, 1000, 16, 256)
    parts = [cost.causal_attention_flops(start, 250, 16, 256) for start in (0, 250, 500, 750)]
    assert sum(parts) == whole == sum(cost.attention_flops(1, row, 16, 256) for row in range(1, 1001))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_weight_bytes_are_what_the_loader_allocates(family, dtype):
    facts = read_model(oracle.shared_checkpoint(family)[1])
    size = {"fp32": 4, "bf16": 2}[dtype]
    allocated = 0
    for param in model_params(facts):
        num_values = 1
        for dim in param.shape:
            num_values *= dim
        allocated += num_values * (4 if param.fp32 else size)
    assert account.weight_bytes(facts, dtype) == allocated


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_classes_of_files_are_those_of_the_dimensions(family, tmp_path):
    """The same classes by name in both kinds of files and by formula; fp32 files hold 4 bytes a value."""
    model, folder = oracle.shared_checkpoint(family)
    expected = {kind: 4 * num for kind, num in expected_params(read_model(folder)).items()}
    assert weight_classes(read_model(folder)) == expected
    assert weight_classes(read_model(write_model(model, tmp_path / "m.gguf"))) == expected
    fused = oracle.save(model, tmp_path / "fused", fused=True)
    assert weight_classes(read_model(fused)) == expected
    assert list(expected) == [kind for kind in CLASSES if kind in expected]


def test_classes_of_what_is_not_used(tmp_path):
    from safetensors.torch import load_file, save_file

    _, folder = oracle.shared_checkpoint("qwen3_5")
    tensors = load_file(folder / "model.safetensors")
    expected = weight_classes(read_model(folder))
    norm = tensors["model.norm.weight"]
    more = {"mtp.norm.weight": norm, "model.visual.patch_embed.proj.bias": norm, "model.unknown.weight": norm}
    save_file(tensors | {name: value.clone() for name, value in more.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    found = weight_classes(read_model(tmp_path))
    assert found == expected | dict.fromkeys(("mtp", "vision", "other"), 4 * len(norm))


def test_this_machine():
    found = hardware.probe()
    assert 1 <= found.num_physical_cores <= found.num_cores <= psutil.cpu_count()
    assert 0 < found.ram_available <= found.ram_bytes <= psutil.virtual_memory().total


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)
    return root


MIB = 1024**2
V2 = {
    "proc/self/cgroup": "0::/job/inner\n",
    "proc/cpuinfo": "processor : 0\nflags\t\t: fpu avx2 amx_bf16 avx512_bf16x\n",
    "sys/fs/cgroup/job/cpu.max": "100000 100000\n",
    "sys/fs/cgroup/job/inner/cpu.max": "max 100000\n",
    "sys/fs/cgroup/job/memory.max": f"{512 * MIB}\n",
    "sys/fs/cgroup/job/memory.current": f"{300 * MIB}\n",
    "sys/fs/cgroup/job/memory.stat": f"anon 5\nfile {200 * MIB}\nshmem {50 * MIB}\n",
    "sys/fs/cgroup/job/inner/memory.max": "max\n",
    "sys/fs/cgroup/job/inner/memory.current": "1\n",
}
V1 = {
    "proc/self/cgroup": "7:memory:/box\n3:cpu,cpuacct:/box\n",
    "proc/cpuinfo": "Features : fp asimd bf16 sve\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{256 * MIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{100 * MIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"cache 1\ntotal_cache {60 * MIB}\ntotal_shmem 0\n",
}


@pytest.mark.parametrize(
    ("files", "limit", "available", "features"),
    [(V2, 512, 512 - (300 - 150), ("avx2", "amx_bf16")), (V1, 256, 256 - 40, ("bf16", "sve"))],
    ids=["v2", "v1"],
)
def test_control_groups_bound_cores_and_memory(files, limit, available, features, tmp_path):
    """The tightest group counts, wherever in the tree; page cache is not used memory, shared memory is."""
    found = hardware.probe(machine(tmp_path, files))
    assert found.num_cores == found.num_physical_cores == 1
    assert (found.ram_bytes, found.ram_available) == (limit * MIB, available * MIB)
    assert found.cpu_features == features and found.has_native_bf16


def test_a_system_that_says_nothing(tmp_path):
    found = hardware.probe(tmp_path)
    assert found.num_cores >= 1 and found.cpu_features == () and not found.has_native_bf16
    assert found.ram_bytes == psutil.virtual_memory().total


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    usage = {"sys/fs/cgroup/job/memory.current": f"{900 * MIB}\n"}
    assert hardware.probe(machine(tmp_path, V2 | usage)).ram_available == 0


def test_hyper_threads_are_counted_once(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    pairs = {0: "0,1", 1: "0,1", 2: "2,3"}
    files = {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": s for n, s in pairs.items()}
    found = hardware.probe(machine(tmp_path, files))
    assert (found.num_cores, found.num_physical_cores) == (3, 2)
