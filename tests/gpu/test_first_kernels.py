"""A start on a card finds its kernels compiled when the weights are there."""

import gc

import pytest
import torch

from engines import IdsAsText
from packhorse.bench.synth import synthesize
from packhorse.core.config import EngineConfig
from packhorse.core.units import GIB
from packhorse.engine.load import load_engine
from packhorse.facts.read import read_model
from packhorse.kernels.cuda import launch, nvrtc

pytestmark = pytest.mark.gpu


def test_nothing_is_compiled_at_first_use(tmp_path, monkeypatch):
    """Whatever a start launches was compiled beside the reading; with experts on the card and in host memory."""
    synthesize(tmp_path / "model", "qwen3.6-35b-a3b", "int4", layers=4)
    facts, really, compiles = read_model(tmp_path / "model"), launch.prepare, nvrtc.compile_code
    compiled: list[str] = []
    late: list[str] = []

    def compile_code(variant, target):
        compiled.append(str(variant))
        return compiles(variant, target)

    def prepare(variants, device, progress=None):
        before = len(compiled)
        really(variants, device, progress)
        late.extend(compiled[before:])

    monkeypatch.setattr(nvrtc, "compile_code", compile_code)
    monkeypatch.setattr(launch, "prepare", prepare)  # of first uses alone
    monkeypatch.setattr(launch, "_code_cache", nvrtc.CodeCache(tmp_path / "code"))
    for vram in (None, int(3.0 * GIB)):
        gc.collect()
        torch.cuda.empty_cache()
        monkeypatch.setattr(launch, "_kernels", {})
        config = EngineConfig(context=8192, sequences=2, kv="fp8", device="cuda", vram=vram)
        assert load_engine(facts, config, IdsAsText).engine.runner.graphs is not None
        assert compiled and not late
        compiled.clear()
