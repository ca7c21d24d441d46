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
SOME = 512
"""Of these, where values are compared one by one: fp32 needs no more for a mean."""


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


@pytest.fixture(scope="module")
def model():
    """On unpacked weights, in fp32."""
    facts = read_model(smollm2())
    return load_model(facts, open_checkpoint(facts), dtype=torch.float32)


@pytest.fixture(scope="module")
def unpacked(model, ids) -> torch.Tensor:
    """Logits of that model for the first SOME tokens."""
    return one_pass(model, ids[:SOME])


def test_perplexity_and_greedy_tokens_are_those_of_transformers(theirs, ids, model, unpacked):
    with torch.inference_mode():
        want = theirs(torch.tensor([ids[:SOME]])).logits[0]
    got = unpacked
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4
    assert perplexity(got, ids[:SOME]) == pytest.approx(perplexity(want, ids[:SOME]), rel=1e-4)
    # Through the engine, in chunks: the tokens that transformers' own generate gives.
    prompt = ids[:350]
    out = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=32, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    tokens, _ = ask(make_engine(model, chunk_len=128, num_pages=24), prompt, max_tokens=32)
    assert tokens == out[0, len(prompt) :].tolist()


_MEMORY = """
import json, sys, threading
import torch
from packhorse.core.config import EngineConfig
from packhorse.core.types import Request, SamplingParams
from packhorse.engine.load import load_engine
from packhorse.facts.read import read_model

class Mute:
    def add(self, token_id): return ""
    def finish(self): return ""

def of_status(name):
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return 1024 * int(status[name].split()[0])

facts = read_model(sys.argv[1])
# Without the pages of libraries, which are read from files. The peak has those, and is that of loading.
before, peak_before = of_status("RssAnon"), of_status("VmRSS")
config = EngineConfig(context=2048, sequences=1, dtype=sys.argv[2], weights="packed", threads=1)
loaded = load_engine(facts, config, Mute)
loading, weights = of_status("VmHWM") - peak_before, of_status("RssAnon") - before
reading, ended = [], threading.Event()

def watch():
    while not ended.wait(0.01):
        reading.append(of_status("RssAnon") - before)

watcher = threading.Thread(target=watch)
watcher.start()
loaded.engine.add(Request("r", tuple(range(5, 2000)), SamplingParams(max_tokens=4)))
while loaded.engine.has_work:
    loaded.engine.step()
ended.set()
watcher.join()
sizes = loaded.sizes
print(json.dumps({"loading": loading, "loaded": weights, "at_rest": of_status("RssAnon") - before,
                  "reading": max(reading),
                  "file": facts.file_bytes, "weights": sizes.weight_bytes, "total": sizes.total_bytes,
                  "largest": max(tensor.num_bytes for tensor in facts.tensors.values())}))
"""


def test_packed_bits_give_the_same_perplexity(ids, unpacked):
    """Without a copy in 16 bits: in fp32 to the digits; in bf16, torch's int4 product with its bf16 scales, within
    0.05 %, which is what bf16 itself moves it by."""
    facts = read_model(smollm2())
    got = one_pass(load_model(facts, open_checkpoint(facts), dtype=torch.float32, packed=True), ids[:SOME])
    assert perplexity(got, ids[:SOME]) == pytest.approx(perplexity(unpacked, ids[:SOME]), rel=1e-6)
    found = {}
    for packed in (True, False):
        model = load_model(facts, open_checkpoint(facts), dtype=torch.bfloat16, packed=packed)
        found[packed] = perplexity(one_pass(model, ids), ids)
    assert found[True] == pytest.approx(found[False], rel=5e-4)


def memory(dtype: str) -> dict[str, int]:
    """Bytes of a process that loads the file as it is and reads 2,000 tokens."""
    run = [sys.executable, "-c", _MEMORY, str(smollm2()), dtype]
    found = json.loads(subprocess.run(run, check=True, capture_output=True).stdout)
    assert found["weights"] <= 1.05 * found["file"]
    assert 0.95 * found["weights"] <= found["loaded"] <= 1.05 * found["file"]
    assert found["loading"] <= found["weights"] + found["largest"] + 32 * 2**20
    return found | {"limit": found["file"] + found["total"] - found["weights"]}


def test_a_process_takes_the_file_and_the_plan():
    """The weights as they are, KV full, and what was planned to work with, also while a prompt is read. While loading,
    the largest tensor as the file has it besides, and slices."""
    found = memory("bf16")
    assert found["loaded"] < found["at_rest"] < found["reading"] <= found["limit"]


@pytest.mark.slow
def test_a_process_that_unpacks_every_product_takes_the_file_and_the_plan():
    """Where there is no product of torch's for packed weights, slices of their values live beside a chunk's."""
    found = memory("fp32")
    assert found["loaded"] < found["at_rest"] < found["reading"] <= 1.05 * found["limit"]
