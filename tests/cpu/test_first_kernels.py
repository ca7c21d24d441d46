"""What is compiled while weights are read; that nothing else is launched is shown on a card."""

import dataclasses
from threading import Event

import pytest
import torch

import kernel_list
from packhorse.core.errors import UsageError
from packhorse.core.formats import PACKED
from packhorse.engine import kernels
from packhorse.engine.kernels import first_kernels
from packhorse.facts.known import known_model
from packhorse.facts.model import ModelFacts, StoredMatrix
from packhorse.kernels.cuda.nvrtc import Target


def facts_of(name: str) -> ModelFacts:
    """A known model, packed: experts in int4-g128 and int5-g32, the rest in q6_k."""
    facts = known_model(name)
    if facts.moe is None:
        return facts
    num, inner, hidden = facts.moe.num_experts, facts.moe.expert_dim, facts.hidden_size
    shapes = {
        "mlp.experts.gate_up_proj": ("int4-g128", (num, 2 * inner, hidden)),
        "mlp.experts.down_proj": ("int5-g32", (num, hidden, inner)),
        "mlp.shared_expert.down_proj.weight": ("q6_k", (hidden, inner)),
    }
    stored = {
        f"model.layers.{layer}.{path}": StoredMatrix(path, PACKED[form], shape, "ours", {}, 128)
        for layer in range(2)
        for path, (form, shape) in shapes.items()
    }
    return dataclasses.replace(facts, stored=stored)


@pytest.mark.parametrize("arch", kernel_list.ARCHS)
def test_every_kind_of_kernel_that_a_start_needs(arch):
    dtype = torch.bfloat16 if Target(arch).has_bf16 else torch.float16
    found = first_kernels(facts_of("qwen3.6-35b-a3b"), dtype, "k5v4", 4, True, arch)
    assert len(set(found)) == len(found)
    for variant in found:
        Target(arch).check(variant)
    wanted = kernel_list.first_start(arch)
    assert {variant.kernel for variant in found} == {variant.kernel for variant in wanted}
    # What does not depend on the weights' formats is the same, to the last macro.
    free = [variant for variant in wanted if "BITS" not in dict(variant.defines)]
    sizes = [variant for variant in free if "TOKENS" in dict(variant.defines)]
    assert set(free) - set(sizes) <= set(found)
    bits = {dict(variant.defines).get("BITS") for variant in found if variant.kernel == "expert_down"}
    assert bits == {5} and not (
        bits & {dict(v.defines).get("BITS") for v in found if v.kernel == "expert_gate_up"}
    )
    assert {dict(v.defines)["TOKENS"] for v in found if v.kernel == "dense_gemv"} == {1, 2, 4}


def test_dense_models_and_types_without_kernels():
    facts = facts_of("qwen3.6-27b")
    found = {variant.kernel for variant in first_kernels(facts, torch.float16, "fp8", 1, False, 75)}
    assert "delta_step" in found and not any(name.startswith("expert") for name in found)
    with pytest.raises(UsageError):
        first_kernels(facts, torch.float32, "fp32", 1, False, 90)


def test_a_load_that_failed_compiles_nothing_more(monkeypatch, capsys):
    """The compiler is asked between kernels; what it raises then ends the thread. Else it says how far it is."""
    done, stop = [], Event()

    def prepare(variants, device, progress):
        for number in range(len(variants)):
            progress(number, len(variants))
            done.append(number)
            if number == 2:
                stop.set()

    monkeypatch.setattr(kernels, "prepare", prepare)
    monkeypatch.setattr(kernels, "target_of", lambda device: Target(90))
    settings = (torch.float16, "fp8", 1, False, torch.device("cpu"))
    kernels.compile_ahead(stop, facts_of("qwen3.6-27b"), *settings)
    assert done == [0, 1, 2]
    capsys.readouterr()
    kernels.compile_ahead(Event(), facts_of("qwen3.6-27b"), *settings)
    assert len(done) > 6
    said, num = capsys.readouterr().err.splitlines(), len(done) - 3
    assert said == [f"compiled {part} of {num} kernels for this card, once" for part in (0, num // 2)]
