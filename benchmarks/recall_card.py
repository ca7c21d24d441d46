"""Recall of the shipped models through the engine, and what each KV codec changes of it, as far as a time allows.

    PYTHONPATH=src python benchmarks/recall_card.py --device cuda --seconds 250 --out DIR

Grids run as the engine itself would have it: its own compute type, codec, chunk and sweep lengths, several requests at
once. The first question of a document reads it; then every question of it, the first one too, is asked over its stored
prefix. TASK:LENGTH:N:K in --cells has K questions a document, each about another needle at another depth; without K it
is one. Pairs answer in fp32 with fp32 KV and plain kernels, then each feature of --features is led over the same tokens
(`packhorse.verify.compare`).

Processes side by side on one card: those that build prompts, then --processes for each model's grid and for its pairs.
When the time is over they are ended, and DIR/recall.json and DIR/recall.md say how many of each cell were asked.
Needs torch, tokenizers, jinja2 and cuda-core beside the source alone.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from packhorse.facts.model import ModelFacts
from packhorse.facts.read import read_model
from packhorse.text.template import ChatTemplate
from packhorse.text.tokenizer import Detokenizer, Tokenizer
from packhorse.verify.tasks import Sample, build_together, score

if TYPE_CHECKING:
    from packhorse.core.config import EngineConfig
    from packhorse.core.types import Usage
    from packhorse.verify.compare import Recorder

ASSETS = Path(__file__).parents[1] / "assets"
CELLS = (
    "single:4096:300,multi_key:4096:300,single:16384:300,multi_key:16384:300,variables:16384:300,kv_json:16384:300,"
    "multi_key:65536:300:10,single:65536:300,multi_key:131072:300:10,single:131072:300"
)
PAIRS = "multi_key:4096:100,frequent_words:4096:40,multi_key:16384:40"
FEATURES = (
    "dtype=bf16,kv=fp8", "dtype=bf16,kv=k5v4", "dtype=bf16,kv=k4v4", "dtype=bf16,kv=bf16", "dtype=fp16,kv=fp16",
    "kv=fp8", "kv=k5v4", "kv=k4v4", "kv=bf16", "kv=fp16",
)  # fmt: skip
PAIR_CHUNK = 2048
"""The same for all engines of a pair, so that only what is named differs."""
ANSWER_ROOM = 512
FIRST_SEED = 20_000
SAVE_SECONDS = 20.0
Record = dict[str, Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Cell:
    """n questions of a task, `together` of them about one document, at ten depths."""

    task: str
    length: int
    n: int
    together: int = 1

    @property
    def num_documents(self) -> int:
        return -(-self.n // self.together)

    def depths(self, document: int) -> list[float]:
        """Of a document's needles."""
        first = document * self.together
        return [((first + i) % 10) / 9 for i in range(min(self.together, self.n - first))]


@dataclass(frozen=True)
class Text:
    """A document as the engine gets it. prefix: the tokens that its questions share; tails: of each question, the
    rest. samples: with neither chat nor tokens, which are those."""

    cell: Cell
    document: int
    prefix: NDArray[np.int32]
    tails: list[NDArray[np.int32]]
    samples: list[Sample]

    def token_ids(self, question: int) -> tuple[int, ...]:
        return (*self.prefix.tolist(), *self.tails[question].tolist())


def parse_cells(text: str) -> list[Cell]:
    parts = (part.split(":") for part in text.split(",") if part)
    return [Cell(task, *(int(number) for number in numbers)) for task, *numbers in parts]


def open_text(folder: Path) -> tuple[ModelFacts, Tokenizer, ChatTemplate]:
    facts = read_model(folder)
    tokenizer = Tokenizer.load(facts)
    return facts, tokenizer, ChatTemplate.load(facts, tokenizer, None)


def make_text(encode: Callable[[Any], list[int]], cell: Cell, document: int) -> Text:
    depths = cell.depths(document)
    samples = build_together(cell.task, encode, length=cell.length, depths=depths, seed=FIRST_SEED + document)
    ids = np.array([sample.token_ids for sample in samples], dtype=np.int32)
    differ = np.flatnonzero((ids != ids[0]).any(0))
    shared = int(differ[0]) if len(differ) else cell.length
    bare = [replace(sample, chat=[], token_ids=()) for sample in samples]
    return Text(cell, document, ids[0, :shared], list(ids[:, shared:]), bare)


def build_texts(folder: Path, cells: Sequence[Cell], counter: Any, queues: Sequence[Any]) -> None:
    """A process: the next document that nobody has built, into each queue, until there is none. Both models have the
    same tokenizer and template: folder is either's."""
    _, tokenizer, template = open_text(folder)
    todo = [(cell, document) for cell in cells for document in range(cell.num_documents)]
    while True:
        with counter.get_lock():
            index = counter.value
            counter.value += 1
        if index >= len(todo):
            return
        text = make_text(lambda chat: tokenizer.encode(template.render(chat), special=False), *todo[index])
        for each in queues:
            each.put(text)


class Batch:
    """Requests of an engine side by side; whoever asked gets the answer's text, usage and seconds."""

    def __init__(self, folder: Path, config: EngineConfig, lock: Any) -> None:
        from packhorse.engine.load import load_engine

        facts, tokenizer, _ = open_text(folder)
        with lock:  # so that the first one compiles the kernels, and the others find them
            self.loaded = load_engine(facts, config, lambda: Detokenizer(tokenizer))
        self.engine = self.loaded.engine
        self.live: dict[str, tuple[Callable[[str, Usage, float], None], list[str], float]] = {}
        self._number = 0

    def ask(
        self, text: Text, question: int, done: Callable[[str, Usage, float], None], steering: Recorder | None = None
    ) -> None:  # fmt: skip
        from packhorse.core.types import Request, SamplingParams

        self._number += 1
        name = str(self._number)
        sampling = SamplingParams(max_tokens=text.samples[question].answer_len, temperature=0.0)
        marks = (len(text.prefix),)
        self.engine.add(Request(name, text.token_ids(question), sampling, marks, steering))
        self.live[name] = done, [], time.perf_counter()

    def step(self) -> None:
        for event in self.engine.step():
            done, parts, began = self.live[event.request_id]
            parts.append(event.text)
            if event.error is not None:
                raise event.error
            if event.finish is not None:
                del self.live[event.request_id]
                done("".join(parts), event.usage, time.perf_counter() - began)

    def finish(self) -> None:
        while self.live:
            self.step()

    @property
    def graph_steps(self) -> int:
        """Decode steps that were captured graphs of the step kernels."""
        graphs = self.engine.runner.graphs
        return 0 if graphs is None else graphs.num_steps

    @property
    def notes(self) -> str:
        sizes = self.loaded.sizes
        return (
            f"{sizes.dtype}, KV {sizes.kv}, chunks of {sizes.chunk_len:,}, sweeps of {sizes.sweep_len:,}; "
            f"{self.loaded.notes[-1]}"
        )


def record_of(sample: Sample, answer: str, **more: Any) -> Record:
    scored = score(sample, answer)
    names = ("task", "language", "length", "depth", "seed")
    return {name: getattr(sample, name) for name in names} | {
        "right": scored.right, "expected": list(sample.expected), "answer": answer.strip()[:200], **more,
    }  # fmt: skip


def run_grid(args: argparse.Namespace, model: str, texts: Any, results: Any, lock: Any) -> None:
    """A process: documents of a queue, the first question cold, then each over the stored prefix."""
    from packhorse.core.config import EngineConfig

    longest = max(cell.length for cell in args.cells) + ANSWER_ROOM
    # Finished ones must find their pages again, whoever is let in meanwhile.
    config = EngineConfig(
        context=longest, sequences=args.at_once, kv_tokens=longest * (args.at_once + 4), device=args.device,
        snapshots=512, threads=1,
    )  # fmt: skip
    batch = Batch(args.assets / f"recall-{model}", config, lock)
    results.put(("engine", model, "grid", batch.notes))
    follow: deque[tuple[Text, int]] = deque()
    ended = False

    def ask(text: Text, question: int, cold: bool) -> None:
        def done(answer: str, usage: Usage, seconds: float) -> None:
            record = record_of(
                text.samples[question], answer, document=text.document, cold=cold, reused=usage.cached_len,
                seconds=round(seconds, 3), graph_steps=batch.graph_steps,
            )  # fmt: skip
            results.put(("grid", model, record))
            if cold:
                follow.extend((text, which) for which in range(len(text.samples)))

        batch.ask(text, question, done)

    while not ended or batch.live or follow:
        while len(batch.live) < args.at_once:
            if follow:
                ask(*follow.popleft(), cold=False)
                continue
            try:
                text = None if ended else texts.get(block=not batch.live)
            except queue.Empty:
                break
            if text is None:
                ended = True
                break
            ask(text, 0, cold=True)
        if batch.live:
            batch.step()


def run_pairs(
    args: argparse.Namespace, model: str, features: Sequence[str], texts: Any, results: Any, lock: Any
) -> None:
    """A process: documents of a queue, answered by the reference and followed by each feature."""
    import torch

    from packhorse.core.config import EngineConfig
    from packhorse.verify.compare import Recorder, parse_changes

    longest = max(cell.length for cell in args.pairs) + ANSWER_ROOM
    reference = EngineConfig(
        context=longest, sequences=args.at_once, kv_tokens=longest * args.at_once, device=args.device, dtype="fp32",
        chunk_len=PAIR_CHUNK, snapshots=64, threads=1,
    )  # fmt: skip
    changes = {name: parse_changes(name, longest) for name in features}
    folder = args.assets / f"recall-{model}"
    batches = {"": Batch(folder, reference, lock)}
    for documents in batched(texts, args.at_once):
        wants = [Recorder() for _ in documents]
        records = ask_all(batches[""], documents, wants)
        results.put(("reference", model, records))
        for name in features:
            if name not in batches:
                batches[name] = Batch(folder, replace(reference, **changes[name]), lock)
                results.put(("engine", model, name, batches[name].notes))
            batch, steps = batches[name], batches[name].graph_steps
            gots = [Recorder(want.token_ids) for want in wants]
            records = ask_all(batch, documents, gots)
            steps, pages = batch.graph_steps - steps, batch.engine.store.stats.pages_cached
            for document, want, got, record in zip(documents, wants, gots, records, strict=True):
                p, q = torch.stack(want.rows), torch.stack(got.rows)
                same = (q.argmax(-1) == torch.tensor(want.token_ids)).tolist()
                if not all(same):  # else greedy decoding goes the same way
                    record.update(ask_all(batch, [document], [None])[0])
                kl = (p.exp() * (p - q)).sum(-1).tolist()
                record.update(
                    kl=kl, same=same, active=pages // len(documents), graph_steps=steps / len(documents)
                )
            results.put(("feature", model, name, records))


def batched(texts: Any, most: int) -> Iterator[list[Text]]:
    """What a queue holds up to `most` of, until it ends with None."""
    while True:
        found = [texts.get()]
        while found[-1] is not None and len(found) < most:
            found.append(texts.get())
        if documents := [text for text in found if text is not None]:
            yield documents
        if found[-1] is None:
            return


def ask_all(batch: Batch, documents: Sequence[Text], steering: Sequence[Recorder | None]) -> list[Record]:
    found: dict[int, Record] = {}

    def ask(index: int, text: Text, steered: Recorder | None) -> None:
        def done(answer: str, usage: Usage, seconds: float) -> None:
            found[index] = record_of(text.samples[0], answer)

        batch.ask(text, 0, done, steered)

    for index, (text, steered) in enumerate(zip(documents, steering, strict=True)):
        ask(index, text, steered)
    batch.finish()
    return [found[index] for index in range(len(documents))]


def guarded(work: Callable[..., None], model: str, results: Any, *rest: Any) -> None:
    """A process's work; an error goes to the parent, and ends this process alone."""
    try:
        work(*rest)
    except BaseException:
        results.put(("error", model, traceback.format_exc()))


class Findings:
    """What the processes sent, and the tables of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.engines: list[str] = []
        self.errors: list[str] = []
        self.grid: dict[str, list[Record]] = {model: [] for model in args.models}
        # By trial: processes that compare other features ask the same reference.
        self.reference: dict[str, dict[Any, Record]] = {model: {} for model in args.models}
        self.features: dict[str, dict[str, list[Record]]] = {model: {} for model in args.models}

    def take(self, kind: str, model: str, *what: Any) -> None:
        from packhorse.verify.recall import trial_key

        if kind == "engine":
            self.engines.append(f"{model}, {what[0]}: {what[1]}")
        elif kind == "error":
            self.errors.append(f"{model}: {what[0]}")
            say(self.errors[-1])
        elif kind == "grid":
            self.grid[model].append(what[0])
        elif kind == "reference":
            self.reference[model] |= {trial_key(record): record for record in what[0]}
        else:
            self.features[model].setdefault(what[0], []).extend(what[1])

    def cell_rows(self) -> list[dict[str, Any]]:
        """A row for each model and cell: cold, and over a stored prefix."""
        from packhorse.verify.recall import wilson

        rows = []
        for model, cell in ((model, cell) for model in self.args.models for cell in self.args.cells):
            found = [r for r in self.grid[model] if (r["task"], r["length"]) == (cell.task, cell.length)]
            row: dict[str, Any] = {
                "model": model,
                "task": cell.task,
                "length": cell.length,
                "asked_for": cell.n,
            }
            cold = {(r["document"], r["depth"]): r for r in found if r["cold"]}
            again = {(r["document"], r["depth"]): r for r in found if not r["cold"]}
            for name, group in (("cold", cold), ("reused", again)):
                right = sum(record["right"] for record in group.values())
                row[name] = {"n": len(group), "right": right, "interval": wilson(right, len(group))}
            seconds = sorted(record["seconds"] for record in cold.values())
            row["differ"] = sum(
                r["answer"] != again[key]["answer"] for key, r in cold.items() if key in again
            )
            row["reused_tokens"] = min((record["reused"] for record in again.values()), default=0)
            row["median_s"] = seconds[len(seconds) // 2] if seconds else None
            row["wrong"] = [
                {k: r[k] for k in ("depth", "seed", "cold", "expected", "answer")}
                for r in found
                if not r["right"]
            ]
            rows.append(row)
        return rows

    def feature_rows(self) -> list[dict[str, Any]]:
        """A row for each model, feature and cell of pairs."""
        from packhorse.verify.compare import feature_row

        rows = []
        for model in self.args.models:
            for cell in self.args.pairs:
                kind = (cell.task, cell.length)
                asked = [r for r in self.reference[model].values() if (r["task"], r["length"]) == kind]
                for name in self.args.features:
                    ours = [r for r in self.features[model].get(name, []) if (r["task"], r["length"]) == kind]
                    if ours:
                        row = feature_row(name, ours, asked)
                        rows.append({"model": model, "task": cell.task, "length": cell.length, **row})
                        rows[-1]["graph_steps"] = round(sum(record["graph_steps"] for record in ours))
        return rows

    def write(self, about: dict[str, Any]) -> None:
        """Both files, whole."""
        document = {
            "format": "packhorse-recall-card", "about": about, "engines": self.engines, "errors": self.errors,
            "cells": self.cell_rows(), "features": self.feature_rows(), "records": self.grid,
        }  # fmt: skip
        for name, text in (("recall.json", json.dumps(document)), ("recall.md", "\n".join(tables(document)))):
            partial = self.args.out / f"{name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.args.out / name)


def tables(document: dict[str, Any]) -> Iterator[str]:
    """The lines of the report for people."""

    def part(found: dict[str, Any]) -> str:
        low, high = found["interval"]
        shown = f"{100 * low:.1f} - {100 * high:.1f} %" if found["n"] else ""
        return f"{found['right']}/{found['n']} | {shown}"

    yield ", ".join(f"{name} {value}" for name, value in document["about"].items())
    yield from ("", *(f"- {line}" for line in dict.fromkeys(document["engines"])), "")
    yield "| model | task | tokens | of | cold | interval | over the stored prefix | interval | differ | median s |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in document["cells"]:
        yield (
            f"| {row['model']} | {row['task']} | {row['length']:,} | {row['asked_for']} | {part(row['cold'])} | "
            f"{part(row['reused'])} | {row['differ']} | {row['median_s']} |"
        )
    yield ""
    yield (
        "| model | task | tokens | feature | active | steps as graphs | pairs | right without / with | only without / "
        "only with | McNemar p | replies' tokens | same top token | KL mean | KL max |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row in document["features"]:
        yield (
            f"| {row['model']} | {row['task']} | {row['length']:,} | {row['feature']} | {row['active']:,} | "
            f"{row['graph_steps']:,} | {row['pairs']} | {row['reference_right']} / {row['right']} | "
            f"{row['only_reference']} / {row['only_feature']} | {row['p']:.3g} | {row['tokens']:,} | "
            f"{row['same_token']:.2%} | {row['kl_mean']:.1e} | {row['kl_max']:.1e} |"
        )
    if document["errors"]:
        yield f"\n{len(document['errors'])} processes failed: see recall.json."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=250.0, help="of the whole run")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of both files")
    parser.add_argument("--models", default="hybrid,dense")
    parser.add_argument("--assets", type=Path, default=ASSETS, help="where recall-MODEL is")
    parser.add_argument("--cells", default=CELLS, help="of the grid, in order: TASK:LENGTH:N[:K],...")
    parser.add_argument("--pairs", default=PAIRS, help="the same for pairs; empty: none")
    parser.add_argument("--features", default=";".join(FEATURES), help="FIELD=VALUE,...;...")
    parser.add_argument("--at-once", type=int, default=16, help="requests of an engine")
    parser.add_argument("--processes", type=int, default=2, help="of each model, for the grid and for pairs")
    parser.add_argument(
        "--builders", type=int, default=0, help="processes that build prompts; 0: the other cores"
    )
    args = parser.parse_args()
    args.models = args.models.split(",")
    args.cells, args.pairs = parse_cells(args.cells), parse_cells(args.pairs)
    args.features = args.features.split(";") if args.pairs else []
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.exit(measure(args))


def measure(args: argparse.Namespace) -> int:
    """Start all, gather until the time is over or all is asked, end all."""
    began = time.monotonic()
    context = get_context("spawn")
    results = context.Queue()
    engines, grid_queues, pair_queues = [], [], []
    ends: list[tuple[Any, int]] = []
    kept = []  # a process that starts looks them up by name
    for model in args.models:
        lock = context.Lock()
        kept.append(lock)
        texts = context.Queue()
        grid_queues.append(texts)
        ends.append((texts, args.processes))
        for _ in range(args.processes):
            engines.append(
                context.Process(
                    target=guarded, args=(run_grid, model, results, args, model, texts, results, lock)
                )
            )
        for part in range(args.processes if args.pairs else 0):
            texts = context.Queue()
            pair_queues.append(texts)
            ends.append((texts, 1))
            mine = args.features[part :: args.processes]
            engines.append(
                context.Process(
                    target=guarded, args=(run_pairs, model, results, args, model, mine, texts, results, lock)
                )
            )
    builders = []
    count = args.builders or min(16, max(2, len(os.sched_getaffinity(0)) - len(engines)))
    for cells, queues in ((args.pairs, pair_queues), (args.cells, grid_queues)):
        counter = context.Value("l", 0)
        kept.append(counter)
        share = max(1, count // 4) if cells is args.pairs else max(1, count - count // 4)
        for _ in range(share):
            work = (
                build_texts,
                "prompts",
                results,
                args.assets / f"recall-{args.models[0]}",
                cells,
                counter,
                queues,
            )
            builders.append(context.Process(target=guarded, args=work))
    for texts, _ in ends:
        texts.cancel_join_thread()  # who would read the rest has been ended
    processes = [*engines, *builders]
    for process in processes:
        process.start()
    findings = Findings(args)
    about: dict[str, Any] = {"device": args.device, "at once": args.at_once, "processes": len(engines)}
    saved, told = time.monotonic(), False
    while time.monotonic() - began < args.seconds and any(process.is_alive() for process in engines):
        if not told and not any(process.is_alive() for process in builders):
            told = True
            for texts, readers in ends:
                for _ in range(readers):
                    texts.put(None)
        gather(findings, results, 0.5)
        if time.monotonic() - saved > SAVE_SECONDS:
            saved = time.monotonic()
            about["seconds"] = round(saved - began)
            findings.write(about)
            say(f"{saved - began:.0f} s: {progress(findings)}")
    about["seconds"] = round(time.monotonic() - began)
    gather(findings, results, 0.1)
    for process in processes:
        process.terminate()  # from here on a message may be cut
    findings.write(about)
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
    print((args.out / "recall.md").read_text(encoding="utf-8"))
    return 1 if findings.errors else 0


def gather(findings: Findings, results: Any, wait: float) -> None:
    """Take what was sent, for as long as something comes."""
    until = time.monotonic() + 5
    try:
        while time.monotonic() < until:
            findings.take(*results.get(timeout=wait))
    except queue.Empty:
        pass


def progress(findings: Findings) -> str:
    asked = {model: len(records) for model, records in findings.grid.items()}
    pairs = {model: sum(map(len, found.values())) for model, found in findings.features.items()}
    return f"answers {asked}, pairs {pairs}"


if __name__ == "__main__":
    main()
