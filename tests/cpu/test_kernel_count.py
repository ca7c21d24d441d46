"""How many kernels a decode step enqueues: a dry capture of models in their true shapes, without a card.

Tensors have no memory (torch's meta device); what a step would enqueue is counted: our launches where they leave for
the driver, and torch's operations that are neither views nor allocations.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import cuda.core
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packhorse.core.formats import PACKED
from packhorse.core.types import PAGE_LEN
from packhorse.engine.experts import join_shared_experts, resident_table
from packhorse.engine.graphs import StepGraphs
from packhorse.facts.known import known_model
from packhorse.facts.weights import class_of
from packhorse.kernels.attention import cuda as attention
from packhorse.kernels.cuda import launch
from packhorse.kernels.cuda.nvrtc import Target
from packhorse.kernels.linear import cuda as linear
from packhorse.layers.linear import Piece
from packhorse.models.experts import ExpertBlocks, ExpertLayout
from packhorse.models.loader import model_params
from packhorse.models.model import Model
from packhorse.plan.predict import step_kernels
from packhorse.quant.packed import PackedTensor
from packhorse.store.kv import KVStore
from packhorse.store.tier import StoreGeometry

MOST = 700
FORM = PACKED["int4-g128"]
PACKED_CLASSES = ("attention", "delta_net", "shared_expert", "mlp")
# As `packhorse convert` and the publishers leave them.
DENSE = ("in_proj_ba", "conv1d", "shared_expert_gate")
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided")


class Kernels(dict):
    """Stands for the table of loaded kernels: every variant is there, as itself."""

    def get(self, key: Any, default: Any = None) -> Any:
        return key[2]


class TorchOps(TorchDispatchMode):
    """Counts torch's operations on the card that start a kernel."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        first = out[0] if isinstance(out, tuple | list) else out
        if isinstance(first, torch.Tensor) and first.is_meta and name not in ALLOCATIONS:
            is_view = not func._schema.is_mutable and any(
                isinstance(arg, torch.Tensor)
                and arg.untyped_storage()._cdata == first.untyped_storage()._cdata
                for arg in args
            )
            self.counts[f"torch {name}"] += not is_view
        return out


@pytest.fixture
def counts(monkeypatch) -> Counter[str]:
    """Kernels by name. Stands a card of 9.0 in."""
    found: Counter[str] = Counter()
    monkeypatch.setattr(launch, "_native_target", lambda index: Target(90))
    monkeypatch.setattr(launch, "_kernels", Kernels())
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(linear, "fits", lambda x, weight: x.is_meta)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(cuda.core, "Stream", SimpleNamespace(from_handle=lambda handle: handle))

    def enqueue(stream: Any, config: Any, kernel: Any, *args: Any) -> None:
        found[kernel.kernel] += 1

    monkeypatch.setattr(cuda.core, "launch", enqueue)
    launch.saturated(torch.device("meta"))  # made once a process
    return found


def bare_model(name: str, dtype: torch.dtype) -> Model:
    """A known model without bytes: its matrices packed, the rest in `dtype` and fp32."""
    facts = known_model(name)
    tensors: dict[str, Any] = {}
    experts = None
    if facts.moe is not None:
        layers = tuple(index for index, moe in enumerate(facts.moe_layers) if moe)
        sizes = facts.moe.num_experts, FORM, FORM, facts.hidden_size, facts.moe.expert_dim
        layout = ExpertLayout(layers, *sizes)
        experts = ExpertBlocks(layout, torch.empty(layout.total_bytes, dtype=torch.uint8, device="meta"))
    for param in model_params(facts):
        kind = class_of(param.choices[0][0].source, facts)
        if kind == "experts":
            assert experts is not None
            tensors[param.path] = (Piece(experts.stack(param.path)),)
        elif kind in PACKED_CLASSES and len(param.shape) == 2 and not any(d in param.path for d in DENSE):
            tensors[param.path] = (Piece(PackedTensor.empty(FORM, *param.shape, device="meta")),)
        else:
            kept = torch.float32 if param.fp32 else dtype
            tensors[param.path] = torch.empty(param.shape, dtype=kept, device="meta")
    return Model(facts, tensors, dtype=dtype, device="meta", exact=False, experts=experts)


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "qwen3.6-27b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("sequences", [1, 16])
def test_kernels_of_a_decode_step(name, sequences, counts):
    model = bare_model(name, torch.bfloat16)
    geometry = StoreGeometry.of(model.facts, torch.bfloat16, PAGE_LEN, "k5v4")
    sizes = {"num_pages": 4, "sequences": sequences, "snapshots": 0, "snapshot_len": 8192}
    store = KVStore(geometry, **sizes, device="meta")
    join_shared_experts(model)
    table = None if model.experts is None else resident_table(model.experts)
    graphs = StepGraphs(model, store, table, sequences=sequences, max_len=262_144, capture=False)
    with torch.no_grad(), TorchOps(counts):  # inference mode would hide what operations are made of
        logits = graphs._buckets[-1].forward(model)
    assert logits.shape == (sequences, model.facts.vocab_size)
    layers = model.facts.num_layers
    print(f"{name}, {sequences} sequences: {counts.total()} kernels, {counts.most_common()}")
    # What is counted is there: each layer's own kernels, and two norms.
    assert counts["residual_norm"] == 2 * layers + 1
    assert counts["delta_step"] + counts["attend_split"] == layers
    assert counts["expert_gate_up"] == counts["expert_plan"] == sum(model.facts.moe_layers)
    assert 8 * layers < counts.total() <= MOST
    assert counts.total() == step_kernels(model.facts)
