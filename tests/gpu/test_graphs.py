"""Captured decode steps against the same engine without them: tiny models, dense and packed weights, every codec."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import expert_blocks
import oracle
from engines import RecordingRunner, make_engine, run_all
from packhorse.core.formats import PACKED
from packhorse.core.types import Request, SamplingParams
from packhorse.core.units import ceil_div
from packhorse.engine.experts import join_shared_experts, resident_table
from packhorse.engine.graphs import StepGraphs
from packhorse.facts.read import read_model
from packhorse.kernels.cuda.launch import card_arch
from packhorse.layers.linear import Linear, PackedLinear, Piece
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model
from packhorse.models.model import Model
from packhorse.quant.packed import Codes, PackedTensor, pack

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64, "num_experts": 16}
MOE = {"num_experts_per_tok": 4, "shared_expert_intermediate_size": 64}
ROUNDING = {torch.bfloat16: 0.04, torch.float16: 0.008}
"""What 16 bits may cost against fp32 over the same weights and codec, of the root mean square of the logits."""
CODED = 0.25
"""The same where fp8 or fewer bits hold K and V, which these models of random weights feel; and how much more than
the plain path the step kernels may be off is asked besides."""


def rtn(weight: torch.Tensor, name: str = "int4-g32") -> PackedTensor:
    """Rounded to nearest, symmetric."""
    form = PACKED[name]
    *lead, cols = weight.shape
    groups = ceil_div(cols, form.group_len)
    padded = F.pad(weight.float().cpu(), (0, groups * form.group_len - cols)).view(*lead, groups, -1)
    scale = (padded.abs().amax(-1) / 7).clamp(min=1e-8).half()
    codes = (padded / scale.float()[..., None]).round().clamp(-8, 7) + 8
    packed = pack(form, Codes(codes.view(*lead, -1)[..., :cols].to(torch.uint8).contiguous(), scale))
    return PackedTensor(form, packed.data.cuda(), packed.num_rows, packed.num_cols)


def pack_tree(node: SimpleNamespace, whole: SimpleNamespace) -> None:
    """Every product's weight and the experts of a layer, but for the router and its like, become those of `whole`,
    packed."""
    for name, value in vars(whole).items():
        if isinstance(value, SimpleNamespace):
            pack_tree(getattr(node, name), value)
        elif isinstance(value, Linear) and name not in ("gate", "shared_expert_gate"):
            bias = getattr(node, name).bias
            setattr(node, name, PackedLinear((Piece(rtn(value.weight)),), bias))
        elif name in ("gate_up_proj", "down_proj") and isinstance(value, torch.Tensor):
            setattr(node, name, rtn(value))


@cache
def checkpoint(family: str) -> Path:
    more = SIZES | MOE if family in ("qwen3_moe", "qwen3_5_moe") else {}
    return oracle.save(oracle.make_model(family, **more), Path(tempfile.mkdtemp()))


def tiny(family: str, dtype: torch.dtype, packed: bool) -> Model:
    return load(checkpoint(family), dtype, packed)


def load(folder: Path, dtype: torch.dtype, packed: bool) -> Model:
    facts = read_model(folder)
    model = load_model(facts, open_checkpoint(facts), dtype=dtype, device="cuda")
    if packed:
        # The same codes in every compute type.
        whole = load_model(facts, open_checkpoint(facts), dtype=torch.float32, device="cuda")
        for index in range(facts.num_layers):
            pack_tree(model.weights.layer(index), whole.weights.layer(index))
    return model


def engine_of(model: Model, kv: str | None, steps: str | None, sequences: int = 4):
    """steps: None without step kernels, else `eager` or `captured`."""
    engine = make_engine(model, device="cuda", kv=kv, sequences=sequences)
    if steps is not None:
        blocks = expert_blocks.join(model)
        join_shared_experts(model)
        if blocks is not None and model.facts.moe.shared_dim:
            blocks = model.experts
            assert blocks.shared is not None
        experts = None if blocks is None else resident_table(blocks)
        engine.runner.graphs = StepGraphs(
            model,
            engine.store,
            experts,
            sequences=sequences,
            max_len=4096,
            capture=steps == "captured",
        )
    assert isinstance(engine.runner, RecordingRunner)
    return engine


def decode(engine, prompts: dict[str, list[int]], forced: dict[str, list[int]]) -> dict:
    """Logits by (name, position) of the forced tokens after each prompt, prompts read one after the other."""
    runner = engine.runner
    for name, prompt in prompts.items():
        bias = SamplingParams(max_tokens=len(forced[name]) + 1)
        engine.add(Request(name, tuple(prompt), bias))
        while engine.scheduler.find(name).state != "decoding":
            engine.step()
            _force(engine, forced)
    while engine.has_work:
        engine.step()
        _force(engine, forced)
    return runner.logits


def _force(engine, forced: dict[str, list[int]]) -> None:
    for sequence in engine.scheduler.running:
        for index in range(len(sequence.generated)):
            if index < len(forced[sequence.id]):
                sequence.generated[index] = forced[sequence.id][index]


def rms_error(got: dict, want: dict) -> float:
    """Over all logits together."""
    got, want = (torch.stack([logits[key] for key in sorted(want)]) for logits in (got, want))
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


CASES = [
    ("llama", torch.float16, False, "fp16"),
    ("qwen2", torch.bfloat16, False, "bf16"),
    ("qwen3", torch.bfloat16, True, "fp8"),
    ("qwen3_5", torch.bfloat16, True, "k5v4"),
    ("qwen3_5", torch.float16, False, "fp16"),
    ("qwen3_moe", torch.float16, True, "k4v4"),
    ("qwen3_5_moe", torch.bfloat16, True, "fp8"),
    ("qwen3_5_moe", torch.float16, True, "k5v4"),
]


@pytest.mark.parametrize(("family", "dtype", "packed", "kv"), CASES)
def test_steps_agree_with_the_layers(family, dtype, packed, kv):
    if dtype is torch.bfloat16 and card_arch(0) < 80:
        pytest.skip("no bf16")
    model = tiny(family, dtype, packed)
    prompts = {"a": oracle.random_ids(70, seed=1), "b": oracle.random_ids(200, seed=2), "c": [5, 6, 7]}
    forced = {name: oracle.random_ids(66, seed=9 + i) for i, name in enumerate(prompts)}
    coded = kv not in ("fp16", "bf16")
    exact = decode(
        engine_of(tiny(family, torch.float32, packed), kv if coded else None, None), prompts, forced
    )
    plain = decode(engine_of(model, kv, None), prompts, forced)
    eager = decode(engine_of(model, kv, "eager"), prompts, forced)
    engine = engine_of(model, kv, "captured")
    captured = decode(engine, prompts, forced)
    assert engine.runner.graphs.num_steps > 60, "the graphs were not used"
    assert exact.keys() == captured.keys() and len(exact) == 3 * 67
    for key in exact:
        assert torch.equal(captured[key], eager[key]), f"capture changed {key}"
    of_plain, of_steps = rms_error(plain, exact), rms_error(captured, exact)
    print(f"{family} {dtype} {kv}: rms error against fp32 {of_plain:.4f}, by step kernels {of_steps:.4f}")
    assert of_plain < (CODED if coded else ROUNDING[dtype])
    assert of_steps < 1.2 * of_plain
    # Alone, a sequence has the bits it had among others.
    alone = decode(engine_of(model, kv, "captured", sequences=1), {"b": prompts["b"]}, forced)
    for key, logits in alone.items():
        assert torch.equal(logits, captured[key]), f"the batch changed {key}"


def test_what_has_no_step_kernels_is_said():
    model = tiny("qwen3_5", torch.float32, False)
    engine = make_engine(model, device="cuda")
    assert "fp32" in StepGraphs.misfit(model, engine.store, None, 4)
    model = tiny("qwen3_5_moe", torch.float16, False)
    engine = make_engine(model, device="cuda")
    assert "not packed" in StepGraphs.misfit(model, engine.store, None, 4)


def test_finished_sequences_leave_their_pages_to_others():
    """Requests come and go, seats change hands, four of nine go on from a prefix: captured steps have the bits of the
    same kernels run one by one."""
    model = tiny("qwen3_5", torch.float16, False)
    results = {}
    for steps in ("eager", "captured"):
        engine = engine_of(model, "fp16", steps, sequences=3)
        for i in range(9):
            prompt = oracle.random_ids(64 * (1 + i % 3) + i, seed=i % 4)
            engine.add(Request(f"r{i}", tuple(prompt), SamplingParams(max_tokens=5 + 7 * (i % 3))))
        events = run_all(engine)
        assert all(found[-1].error is None for found in events.values())
        assert {name for name, found in events.items() if found[-1].usage.cached_len} == {
            "r4",
            "r5",
            "r7",
            "r8",
        }
        results[steps] = engine.runner.logits
    assert results["eager"].keys() == results["captured"].keys() and len(results["eager"]) == 9 * 12
    for key, logits in results["eager"].items():
        assert torch.equal(results["captured"][key], logits), key
