"""Logits and greedy tokens equal transformers', for every family and every way through the engine."""

import pytest
import torch

import oracle
from engines import ask, load_folder, make_engine, one_pass, tiny_model
from oracle import BOUND, BOUNDS_16_BIT, relative_error, rms_error
from packhorse.facts.read import read_model

PROMPT_LEN = 300


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_one_shot_and_chunked(family, exact):
    reference, _ = oracle.shared_checkpoint(family)
    ids = oracle.random_ids(PROMPT_LEN)
    want = oracle.oracle_logits(reference, ids)[-1]
    # Pages, chunks and snapshots of odd sizes; the first holds the whole prompt in one step.
    for page_len, chunk_len, snapshot_len in [(256, 512, 512), (64, 128, 64), (16, 48, 80), (7, 35, 21)]:
        engine = make_engine(
            tiny_model(family, exact),
            page_len=page_len,
            chunk_len=chunk_len,
            snapshot_len=snapshot_len,
            num_pages=4096 // page_len,
        )
        ask(engine, ids)
        assert relative_error(engine.runner.logits["r", PROMPT_LEN - 1], want) < BOUND


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_step_by_step_and_greedy(family):
    """64 decode steps: the same tokens, and logits within the bound at each."""
    reference, _ = oracle.shared_checkpoint(family)
    ids = oracle.random_ids(PROMPT_LEN)
    want = oracle.oracle_greedy(reference, ids, 64)
    logits = oracle.oracle_logits(reference, ids + want)
    for exact in (False, True):
        engine = make_engine(tiny_model(family, exact))
        tokens, _ = ask(engine, ids, max_tokens=64)
        assert tokens == want
        got = torch.stack([engine.runner.logits["r", p] for p in range(PROMPT_LEN - 1, PROMPT_LEN + 63)])
        assert relative_error(got, logits[PROMPT_LEN - 1 : PROMPT_LEN + 63]) < BOUND


@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_resumed_from_a_prefix(family):
    """A second prompt that shares 200 tokens, and a second turn after an answer, read only what is new."""
    reference, _ = oracle.shared_checkpoint(family)
    ids = oracle.random_ids(PROMPT_LEN)
    engine = make_engine(tiny_model(family, False))
    answer, _ = ask(engine, ids, max_tokens=70, marks=(200,))
    turn = [*ids, *answer, *oracle.random_ids(40, seed=5)]
    fork = [*ids[:200], *oracle.random_ids(90, seed=6)]
    for prompt, least in ((turn, 320), (fork, 192)):
        name = str(len(prompt))
        _, event = ask(engine, prompt, name=name)
        assert event.usage.cached_len >= least
        want = oracle.oracle_logits(reference, prompt)[-1]
        assert relative_error(engine.runner.logits[name, len(prompt) - 1], want) < BOUND


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe"])
def test_a_prompt_of_one_token(family):
    reference, _ = oracle.shared_checkpoint(family)
    engine = make_engine(tiny_model(family, False))
    tokens, event = ask(engine, [17], max_tokens=5)
    assert tokens == oracle.oracle_greedy(reference, [17], 5)
    assert event.usage.cached_len == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe"])
@pytest.mark.parametrize(("fused", "shards"), [(True, False), (False, True), (True, True)])
def test_checkpoint_forms(family, fused, shards, tmp_path):
    """Fused experts and one tensor an expert, one file and several: the same bits."""
    reference, _ = oracle.shared_checkpoint(family)
    folder = oracle.save(reference, tmp_path, fused=fused, shards=shards)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == shards
    ids = oracle.random_ids(70)
    logits = []
    for model in (tiny_model(family, True), load_folder(folder, exact=True)):
        engine = make_engine(model)
        ask(engine, ids)
        logits.append(engine.runner.logits["r", 69])
    assert torch.equal(*logits)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("variant", oracle.VARIANTS)
def test_what_a_config_may_say(variant, exact):
    """Every position of one pass, and the last one read in chunks from a prefix."""
    reference, _ = oracle.shared_checkpoint(variant)
    model = tiny_model(variant, exact)
    ids = oracle.random_ids(PROMPT_LEN)
    want = oracle.oracle_logits(reference, ids)
    assert relative_error(one_pass(model, ids), want) < BOUND
    engine = make_engine(model, chunk_len=64)
    ask(engine, ids[:129], name="before")
    _, event = ask(engine, ids)
    assert event.usage.cached_len == 128
    assert relative_error(engine.runner.logits["r", PROMPT_LEN - 1], want[-1]) < BOUND


def test_text_of_a_model_with_vision(tmp_path):
    """The text part is loaded from under its prefix; what is left out is noted, and weighs nothing."""
    reference = oracle.make_model_with_vision()
    folder = oracle.save(reference, tmp_path)
    facts = read_model(folder)
    assert "Images and video are not read: the vision part is left out." in facts.notes
    vision = [t for t in facts.tensors.values() if "visual" in t.name]
    assert any(n.startswith(f"{len(vision)} tensors") and "vision" in n for n in facts.notes)
    ids = oracle.random_ids(PROMPT_LEN)
    want = oracle.oracle_logits(reference, ids)
    for exact in (False, True):
        model = load_folder(folder, exact=exact)
        assert relative_error(one_pass(model, ids), want) < BOUND
    assert model.storage_bytes < sum(t.num_bytes for t in facts.tensors.values() if t not in vision) * 1.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_16_bit(family, dtype):
    """Every position of one prompt, teacher-forced, against fp32."""
    reference, folder = oracle.shared_checkpoint(family)
    ids = oracle.random_ids(PROMPT_LEN)
    got = one_pass(load_folder(folder, dtype=dtype), ids)
    error = rms_error(got, oracle.oracle_logits(reference, ids))
    assert BOUND < error < BOUNDS_16_BIT[dtype]
