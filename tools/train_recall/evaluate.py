"""How often a model gives exactly the right reply, by task and length.

The prompt and the right reply go through the model at once; the sample is solved where every token of the
reply is the likeliest. Then greedy decoding gives that reply too, so this never counts more than decoding.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from train_recall.corpus import render
from train_recall.net import RecallNet, make_batch, plain_ops
from train_recall.vocabulary import TURN_END, FastEncoder

from packhorse.verify.tasks import build

Made = tuple["Cell", np.ndarray, int, int]
"""A sample: its cell, ids of prompt and reply, the reply's first index, and the depth's index."""
ROOM = 192
"""Tokens for replies behind a prompt; a multiple of the chunk."""


@dataclass(frozen=True)
class Cell:
    """What is measured: n samples of a task at a length, spread over 10 depths."""

    task: str
    length: int
    n: int
    language: str = "en"


@lru_cache
def encoder(path: str) -> FastEncoder:
    return FastEncoder(Tokenizer.from_file(path))


def make_sample(tokenizer: str, cell: Cell, index: int) -> Made:
    """Sample `index` of a cell."""
    encode = encoder(tokenizer)

    def chat(messages: list[dict[str, str]]) -> list[int]:
        return encode(render(messages))

    depth = index % 10
    sample = build(
        cell.task, chat, length=cell.length, depth=depth / 9, seed=10_000 + index, language=cell.language
    )
    reply = encode(sample.reply + TURN_END)
    return cell, np.array([*sample.token_ids, *reply], dtype=np.int16), len(sample.token_ids), depth


def start_samples(
    pool: ProcessPoolExecutor, tokenizer: Path, cells: Iterable[Cell]
) -> dict[Cell, list[Future]]:
    """Begin to make all samples of all cells, beside whatever runs."""
    return {
        cell: [pool.submit(make_sample, str(tokenizer), cell, i) for i in range(cell.n)] for cell in cells
    }


@torch.no_grad()
def solved(net: RecallNet, samples: list[Made], device: str) -> list[bool]:
    """Which samples of one length are solved."""
    T = samples[0][0].length + ROOM
    T = -(-T // 64) * 64
    ids = torch.zeros(len(samples), T, dtype=torch.long)
    for row, (_, tokens, _, _) in enumerate(samples):
        ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
    ids = ids.to(device)
    rows, targets, owner = [], [], []
    for row, (_, tokens, start, _) in enumerate(samples):
        rows += [row * T + at for at in range(start - 1, len(tokens) - 1)]
        targets += tokens[start:].tolist()
        owner += [row] * (len(tokens) - start)
    batch = make_batch(net.config, len(samples), T, device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with plain_ops():
        found = net(ids.flatten(), batch, torch.tensor(rows, device=device), dtype).argmax(-1).cpu()
    right = [True] * len(samples)
    for which, ok in zip(owner, (found == torch.tensor(targets)).tolist(), strict=True):
        right[which] &= ok
    return right


def measure(
    net: RecallNet, samples: Iterable[Made], device: str, tokens: int = 262_144
) -> list[dict[str, Any]]:
    """A row a cell: task, length, language, n, right, and right by depth."""
    rows: dict[Cell, dict[str, Any]] = {}
    waiting: list[Made] = []

    def run() -> None:
        for (cell, _, _, depth), ok in zip(waiting, solved(net, waiting, device), strict=True):
            blank = {"task": cell.task, "length": cell.length, "language": cell.language, "n": 0, "right": 0}
            row = rows.setdefault(cell, {**blank, "by_depth": [[0, 0] for _ in range(10)]})
            row["n"] += 1
            row["right"] += ok
            row["by_depth"][depth][0] += ok
            row["by_depth"][depth][1] += 1
        waiting.clear()

    for sample in samples:
        if waiting and (sample[0] != waiting[0][0] or len(waiting) >= max(1, tokens // sample[0].length)):
            run()
        waiting.append(sample)
    if waiting:
        run()
    return list(rows.values())
