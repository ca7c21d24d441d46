"""A real model: SmolLM2-135M from its GGUF file, against transformers' load of the same file."""

import importlib.resources
import json
import subprocess
import sys

import pytest
import torch

from engines import ask, make_engine, one_pass
from packhorse.facts.read import read_model
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model
from packhorse.text.tokenizer import Tokenizer
from smollm2 import smollm2

TOKENS = 1024


def perplexity(logits: torch.Tensor, ids: list[int]) -> float:
    """exp of the mean negative log-likelihood of ids[1:], in float64."""
    logprobs = logits[:-1].double().log_softmax(-1)
    return float((-logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].mean()).exp())


@pytest.fixture(scope="module")
def theirs():
    import transformers

    path = smollm2()
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """A fixed text: the beginning of the demo's document."""
    text = importlib.resources.files("packhorse.text").joinpath("data/demo.md").read_text()
    return Tokenizer.load(read_model(smollm2())).encode(text)[:TOKENS]


def test_perplexity_and_greedy_tokens_are_those_of_transformers(theirs, ids):
    facts = read_model(smollm2())
    model = load_model(facts, open_checkpoint(facts), dtype=torch.float32)
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0]
    got = one_pass(model, ids)
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4
    assert perplexity(got, ids) == pytest.approx(perplexity(want, ids), rel=1e-4)
    # Through the engine, in chunks: the tokens that transformers' own generate gives.
    prompt = ids[:700]
    out = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=32, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    tokens, _ = ask(make_engine(model, chunk_len=256, num_pages=24), prompt, max_tokens=32)
    assert tokens == out[0, len(prompt) :].tolist()


_MEMORY = """
import json, sys
import psutil, torch
torch.set_num_threads(1)
from packhorse.facts.read import read_model
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model
facts = read_model(sys.argv[1])
before = psutil.Process().memory_info().rss
model = load_model(facts, open_checkpoint(facts), dtype=torch.bfloat16, packed=True)
# Not getrusage: that counts the process that this one was forked from too.
status = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith("VmHWM"))
peak = 1024 * int(status["VmHWM"].split()[0]) - before
added = psutil.Process().memory_info().rss - before
print(json.dumps([added, peak, facts.file_bytes, model.storage_bytes]))
"""


def test_packed_bits_give_the_same_perplexity_in_no_more_memory(ids):
    """Without a copy in 16 bits: fp32 to the digits; bf16 (torch's int4 product) as near as bf16 is to itself, whose
    roundings alone move this by 0.1 %; what loading adds to a process is the file, 5 % of it and what the allocator
    keeps."""
    facts, ids = read_model(smollm2()), ids[:512]
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for packed in (True, False):
            model = load_model(facts, open_checkpoint(facts), dtype=dtype, packed=packed)
            found[dtype, packed] = perplexity(one_pass(model, ids), ids)
    assert found[torch.float32, True] == pytest.approx(found[torch.float32, False], rel=1e-6)
    assert found[torch.bfloat16, True] == pytest.approx(found[torch.bfloat16, False], rel=3e-3)
    run = [sys.executable, "-c", _MEMORY, str(smollm2())]
    added, peak, file_bytes, kept = json.loads(subprocess.run(run, check=True, capture_output=True).stdout)
    assert kept <= 1.05 * file_bytes
    assert added <= 1.05 * file_bytes + 32 * 2**20
    # While loading: its largest tensor as the file has it, and slices.
    assert peak <= kept + max(tensor.num_bytes for tensor in facts.tensors.values()) + 48 * 2**20
