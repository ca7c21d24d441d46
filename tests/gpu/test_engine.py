"""The engine on a card through the reference kernels: tiny models in fp32 against transformers on the CPU."""

import gc
import tempfile
from pathlib import Path

import pytest
import torch

import oracle
from engines import IdsAsText, ask, make_engine, run_all
from packhorse.core.config import EngineConfig
from packhorse.core.errors import UnsupportedCardError
from packhorse.core.types import Request, SamplingParams
from packhorse.engine.load import load_engine
from packhorse.facts.read import read_model
from packhorse.kernels.cuda.launch import card_arch
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model

pytestmark = pytest.mark.gpu

BOUND = 1e-4  # of the largest logit


@pytest.fixture(autouse=True)
def _no_tf32():
    assert torch.get_float32_matmul_precision() == "highest", "fp32 products must not be TF32"


def model_on_card(family: str, dtype: torch.dtype):
    facts = read_model(oracle.shared_checkpoint(family)[1])
    return load_model(facts, open_checkpoint(facts), dtype=dtype, device="cuda")


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_greedy_and_resumed(family):
    """64 greedy tokens in chunks, then a second turn from the prefix; logits within the bound throughout."""
    reference, _ = oracle.shared_checkpoint(family)
    ids = oracle.random_ids(300)
    want = oracle.oracle_greedy(reference, ids, 64)
    engine = make_engine(model_on_card(family, torch.float32), chunk_len=128, device="cuda")
    tokens, _ = ask(engine, ids, max_tokens=64)
    assert tokens == want
    turn = [*ids, *want, *oracle.random_ids(40, seed=5)]
    _, event = ask(engine, turn, name="turn")
    assert event.usage.cached_len >= 320
    logits = oracle.oracle_logits(reference, turn)
    for name, position in (("r", 299), ("r", 340), ("turn", len(turn) - 1)):
        got = engine.runner.logits[name, position].cpu()
        error = float((got - logits[position]).abs().max() / logits[position].abs().max())
        assert error < BOUND, f"{name} {position}: {error:.1e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_16_bit_logits_stay_near(family, dtype):
    """Dense families in 16 bits: within 5 % (bf16) and 1 % (fp16) of fp32's largest logit."""
    ids = oracle.random_ids(200)
    want = oracle.oracle_logits(oracle.shared_checkpoint(family)[0], ids)[-1]
    engine = make_engine(model_on_card(family, dtype), device="cuda")
    ask(engine, ids)
    got = engine.runner.logits["r", 199].cpu()
    bound = 0.05 if dtype is torch.bfloat16 else 0.01
    assert float((got - want).abs().max() / want.abs().max()) < bound


def test_bf16_is_refused_where_the_card_has_none():
    if card_arch(0) >= 80:
        pytest.skip("this card has bf16: run with --as-arch 75")
    facts = read_model(oracle.shared_checkpoint("qwen3")[1])
    with pytest.raises(UnsupportedCardError, match=r"7\.5"):
        load_engine(facts, EngineConfig(dtype="bf16", device="cuda"), IdsAsText)


def test_allocations_are_on_the_card_and_bounded():
    """The store takes what it reports, and a request takes no more than its activations."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine = make_engine(model_on_card("qwen3_5_moe", torch.float32), device="cuda")
    taken = torch.cuda.memory_allocated() - before
    model = engine.runner.model
    counted = model.storage_bytes + sum(engine.store.storage_bytes.values())
    if model.embed_device.type == "cpu":
        counted -= 4 * model.facts.vocab_size * model.facts.hidden_size
    # The allocator rounds each block up to 512 bytes.
    assert counted <= taken <= counted + 512 * 200
    ask(engine, oracle.random_ids(300), max_tokens=8)
    first = torch.cuda.memory_allocated()
    for seed in range(5):
        ask(engine, oracle.random_ids(300, seed=seed), max_tokens=8, name=f"r{seed}")
    engine.runner.logits.clear()
    assert torch.cuda.memory_allocated() <= first


def test_peak_memory_of_a_long_prompt_stays_within_the_plan():
    """Real head counts over a 12,000-token prompt: pools and working space as sized, and no more."""
    model = oracle.make_model(
        "qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=16384,
    )
    folder = Path(tempfile.mkdtemp())
    facts = read_model(oracle.save(model, folder))
    config = EngineConfig(context=16384, sequences=1, dtype="fp16", device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    loaded = load_engine(facts, config, IdsAsText)
    torch.cuda.reset_peak_memory_stats()
    loaded.engine.add(Request("r", tuple(oracle.random_ids(12_000)), SamplingParams(max_tokens=4)))
    events = run_all(loaded.engine)["r"]
    assert events[-1].error is None
    peak = torch.cuda.max_memory_allocated() - before
    planned = loaded.sizes.total_bytes
    print(f"planned {planned / 2**20:.0f} MiB, peak {peak / 2**20:.0f} MiB")
    assert peak <= planned
    assert planned - loaded.sizes.workspace_bytes <= peak, "the pools were not taken"
