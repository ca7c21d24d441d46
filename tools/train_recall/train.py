"""Trains a recall model: python -m train_recall.train hybrid --out DIR (see README.md in this folder).

Everything follows from the seed and the step number, so a run that was cut into several commands reads the
same documents as one that was not. Only weights pass from one command to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from train_recall.corpus import KINDS, make_document
from train_recall.evaluate import Cell, measure, start_samples
from train_recall.muon import Optimizer
from train_recall.net import RecallNet, compile_ops, make_batch
from train_recall.vocabulary import FastEncoder, save_tokenizer, write_json

# Part of the run at which each mixture of document lengths begins.
Curriculum = Sequence[tuple[float, dict[int, int]]]
CURRICULUM: Curriculum = (
    (0.00, {512: 1}),
    (0.22, {2048: 7, 512: 3}),
    (0.42, {8192: 6, 2048: 4}),
    (0.60, {32768: 6, 8192: 3, 2048: 1}),
    (0.80, {131072: 2, 32768: 3, 8192: 3, 2048: 2}),
)
WARM_UP = 60
LEARNS_BY = 2400
"""Steps from the seed by which a run that will ever read does: where its loss is still high it ends."""
ANSWER_POWER = 0.25
"""A document weighs as the number of its answers' tokens to this power: it has hundreds of keys to ask for, but
only one list of most frequent words."""


class Documents(torch.utils.data.Dataset):
    """The batch of each step: ids and labels [B, T] int16."""

    def __init__(
        self, tokenizer: Path, seed: int, steps: range, total: int, tokens: int, curriculum: Curriculum,
        short: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.tokenizer, self.seed, self.steps, self.total = tokenizer, seed, steps, total
        self.tokens, self.curriculum, self.short = tokens, curriculum, short
        self.encode: FastEncoder | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def length(self, step: int) -> int:
        """Tokens of a document in this step."""
        mix = [m for start, m in self.curriculum if step >= start * self.total][-1]
        T = Random(f"{self.seed}/{step}/length").choices(list(mix), list(mix.values()))[0]
        return T

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        step = self.steps[index]
        if self.encode is None:
            self.encode = FastEncoder(Tokenizer.from_file(str(self.tokenizer)))
        T = self.length(step)
        made = [
            make_document(Random(f"{self.seed}/{step}/{i}"), self.encode, T, self.short)
            for i in range(max(1, self.tokens // T))
        ]
        return np.stack([ids for ids, _ in made]), np.stack([labels for _, labels in made])


def rate(step: int, total: int, first: int) -> float:
    """Part of the full rate: warm-up after each start, flat, and down to 0.02 over the last 45 %."""
    warm = min(1.0, (step - first + 1) / WARM_UP)
    left = (total - step) / (0.45 * total)
    return warm * min(1.0, max(0.02, left))


def save(net: RecallNet, folder: Path, kind: str, step: int) -> None:
    """The weights in bf16 as a checkpoint folder, and the step they are from."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in net.state_dict().items()}
    partial = folder / "partial"
    save_file(tensors, partial, metadata={"format": "pt", "step": str(step)})
    partial.replace(folder / f"{kind}.safetensors")


def repeatable() -> None:
    """The same command gives the same weights to the bit on the same card and software. Before CUDA is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def answer_loss(logits: Tensor, targets: Tensor, owners: Tensor, documents: int) -> tuple[Tensor, Tensor]:
    """The loss to train on, and the plain mean a token. logits [R, V], targets [R], owners [R]: the row's document.

    Both are 0 without rows: there are documents that no answer fits in.
    """
    losses = F.cross_entropy(logits, targets, reduction="none")
    counts = torch.bincount(owners, minlength=documents).clamp(min=1)
    weights = counts[owners].float() ** (ANSWER_POWER - 1)
    return (losses * weights).sum() / weights.sum().clamp(min=1e-9), losses.detach().sum() / max(
        1, len(losses)
    )


def train(args: argparse.Namespace) -> None:
    """One command's part of a run; without steps it only measures."""
    repeatable()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    started = time.monotonic()
    net = RecallNet(args.kind, args.seed).to(device)
    if args.weights:
        net.load_state_dict({k: v.float() for k, v in load_file(args.weights).items()})
    folder = Path(args.work)
    save_tokenizer(folder)
    steps = range(args.first, min(args.total, args.until or args.total))
    cells = [
        Cell(task, int(L), int(n), *more)
        for task, L, n, *more in (e.split(":") for e in args.eval.split(",") if e)
    ]
    pool = ProcessPoolExecutor(args.workers or 1, mp_context=get_context("fork"))
    waiting = start_samples(pool, folder / "tokenizer.json", cells)
    data = Documents(
        folder / "tokenizer.json", args.seed, steps, args.total, args.tokens, parse_mix(args.mix),
        KINDS | parse_weights(args.short),
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=args.workers, prefetch_factor=6 if args.workers else None,
        multiprocessing_context=get_context("fork") if args.workers else None,
    )  # fmt: skip
    if device == "cuda":
        compile_ops()
    optimizer = Optimizer(net.named_parameters())
    batches: dict[tuple[int, int], Any] = {}
    mean = torch.zeros((), device=device)
    balance = torch.zeros((), device=device)
    last_print, last_save, count, marks = time.monotonic(), time.monotonic(), 0, []
    step = args.first - 1
    for step, (ids, labels) in zip(steps, loader, strict=True):
        B, T = ids.shape
        ids, labels = ids.to(device).long().flatten(), labels.to(device).long().flatten()
        rows = labels.ge(0).nonzero()[:, 0]
        if (B, T) not in batches:
            batches[B, T] = make_batch(net.config, B, T, device)
        logits = net(ids, batches[B, T], rows, dtype)
        loss, plain = answer_loss(logits, labels[rows], rows // T, B)
        even = net.balance()
        (loss + args.balance * even).backward()
        part = rate(step, args.total, args.first)
        optimizer.step(args.matrix_rate * part, args.other_rate * part)
        mean += plain
        balance += even.detach()
        count += 1
        if step < args.first + 5 or (step + 1) % 50 == 0:
            now = time.monotonic()
            value = (mean / count).item()
            marks.append({"step": step + 1, "T": T, "loss": round(value, 4), "at_s": round(now - started, 1)})
            print(
                f"{args.kind} step {step + 1} T {T} loss {value:.4f} balance {(balance / count).item():.2f} "
                f"{count * args.tokens / (now - last_print) / 1e6:.2f} Mtok/s at {now - started:.0f} s",
                flush=True,
            )
            mean.zero_()
            balance.zero_()
            count, last_print = 0, now
            if value != value or (step + 1 >= LEARNS_BY and args.first == 0 and value > 0.7):
                print(f"{args.kind}: it does not learn", flush=True)
                break
        if time.monotonic() - last_save > 45:
            save(net, Path(args.out), args.kind, step + 1)
            last_save = time.monotonic()
        if time.monotonic() - started > args.seconds:
            break
    save(net, Path(args.out), args.kind, step + 1)
    (Path(args.out) / f"{args.kind}-log.json").write_text(json.dumps(marks))
    report(args, net, waiting, device, started)
    pool.shutdown(cancel_futures=True)


def parse_weights(text: str) -> dict[str, int]:
    """Weights by name from NAME:WEIGHT+NAME:WEIGHT."""
    parts = (part.split(":") for part in text.split("+") if part)
    return {name: int(weight) for name, weight in parts}


def parse_mix(text: str) -> Curriculum:
    """A curriculum from START=LENGTH:WEIGHT+LENGTH:WEIGHT,... or the standard one."""
    if not text:
        return CURRICULUM
    stages = (stage.split("=") for stage in text.split(","))
    return [
        (float(start), {int(T): weight for T, weight in parse_weights(mix).items()}) for start, mix in stages
    ]


def report(
    args: argparse.Namespace, net: RecallNet, waiting: dict[Cell, list[Future]], device: str, started: float
) -> None:
    """Recall of the weights as saved, written as it comes; stops in time, with what was measured."""
    net.load_state_dict(
        {k: v.float() for k, v in load_file(Path(args.out) / f"{args.kind}.safetensors").items()}
    )
    done: list[dict[str, Any]] = []
    for cell, jobs in waiting.items():
        begun = time.monotonic()
        in_time = (job.result() for job in jobs if time.monotonic() - started < args.all_seconds)
        rows = measure(net, in_time, device)
        done += rows
        for row in rows:
            right, n = row["right"], row["n"]
            print(
                f"{args.kind} {cell} {right}/{n} = {right / n:.4f} {time.monotonic() - begun:.1f} s",
                flush=True,
            )
        write_json(Path(args.out) / f"{args.kind}-recall.json", done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["hybrid", "dense"])
    parser.add_argument("--out", required=True, help="folder for weights and figures")
    parser.add_argument("--work", default="/tmp/recall", help="folder for the tokenizer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total", type=int, default=4000, help="steps of the whole run")
    parser.add_argument(
        "--until", type=int, help="step to end before; rates and mixtures still follow --total"
    )
    parser.add_argument("--first", type=int, default=0, help="step to begin with, weights given")
    parser.add_argument("--weights", help="weights of an earlier command")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    parser.add_argument("--mix", default="", help="another curriculum: START=LENGTH:WEIGHT+LENGTH:WEIGHT,...")
    parser.add_argument(
        "--short",
        default="",
        help="other weights of kinds in documents of up to 8,192 tokens: KIND:WEIGHT+...",
    )
    parser.add_argument("--all-seconds", type=float, default=1e9, help="stop measuring after so long")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop training after so long")
    parser.add_argument("--workers", type=int, default=7)
    parser.add_argument("--matrix-rate", type=float, default=0.02)
    parser.add_argument("--other-rate", type=float, default=0.004)
    parser.add_argument("--balance", type=float, default=0.01)
    parser.add_argument("--eval", default="", help="task:length:n[:language], separated by commas")
    args = parser.parse_args()
    if unknown := parse_weights(args.short).keys() - KINDS:
        parser.error(f"--short: there is no kind {unknown.pop()!r}, only {', '.join(KINDS)}")
    train(args)


if __name__ == "__main__":
    main()
