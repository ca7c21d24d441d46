"""The training tool: the same seed gives the same weights, to the bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def trained(out: Path, *more: str) -> dict[str, torch.Tensor]:
    """The weights after a few steps over documents of two lengths."""
    args = [sys.executable, "-m", "train_recall.train", "hybrid", "--out", str(out), "--work", str(out)]
    args += ["--tokens", "1024", "--mix", "0=512:1+1024:1", "--workers", "0", "--total", "4", *more]
    path = f"{ROOT / 'tools'}{os.pathsep}{ROOT / 'src'}"
    subprocess.run(
        args, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL
    )
    return load_file(out / "hybrid.safetensors")


@pytest.mark.slow
def test_training_repeats_to_the_bit(tmp_path):
    first, again = trained(tmp_path / "a"), trained(tmp_path / "b")
    assert [name for name in first if not torch.equal(first[name], again[name])] == []
    other = trained(tmp_path / "c", "--seed", "2")
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
