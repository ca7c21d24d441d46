"""A long document from disk and from host memory: first tokens of a new process beside the rates of disk and link, and
what writing behind costs the answers meanwhile.

    PYTHONPATH=src python benchmarks/durable_card.py --layers 8 --tokens 245760 --kv fp8 --report FILE

The model is made up, with the true shapes of Qwen3.6-35B-A3B in int4, and has the first so many of its 40 layers only:
one in four keeps KV, 1,024 bytes a token in fp8. KV of the document is random and was never read from a prompt; it goes
to disk as any does. The first process answers and writes, a second one reads. Times are of this machine; only figures
of the 40 layers that are marked as computed are not measured.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packhorse.bench.card import link_rates
from packhorse.bench.offline import Mute, fill
from packhorse.bench.origin import origin
from packhorse.bench.synth import synthesize
from packhorse.core.config import EngineConfig
from packhorse.core.types import Request, SamplingParams
from packhorse.core.units import GIB, MIB, parse_bytes, round_up
from packhorse.engine.engine import Engine
from packhorse.engine.load import load_engine
from packhorse.facts.read import read_model
from packhorse.store.tier import ComputeTier

LIKE = "qwen3.6-35b-a3b"
ROOM = 4096
STEP_OF_40_LAYERS_S = 0.0105
"""A decode step of the whole model at 245,760 tokens on one H200 (docs/experts.md's cap): what a slice is beside it."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Work:
    """One process: an engine over the store, and the document's tokens."""

    def __init__(self, args: argparse.Namespace, *, ram: int = 0) -> None:
        import torch

        self.device = torch.device(args.device)
        self.folder = args.folder / "store"
        facts = read_model(args.folder / LIKE)
        tokens = round_up(args.tokens + ROOM, 64)
        config = EngineConfig(
            context=tokens, sequences=1, kv_tokens=tokens, kv=args.kv, device=args.device, snapshots=8,
            store=self.folder, ram=ram, dtype=args.dtype, vram=args.vram,
        )  # fmt: skip
        began = time.perf_counter()
        self.loaded = load_engine(facts, config, Mute)
        self.load_s = time.perf_counter() - began
        self.engine: Engine = self.loaded.engine
        self.vocab = facts.vocab_size
        self.document = tuple(random.Random(1).choices(range(self.vocab), k=args.tokens))
        self.number = 0

    def question(self, length: int = 64) -> tuple[int, ...]:
        """The document and random tokens, others each time."""
        self.number += 1
        return self.document + tuple(random.Random(self.number + 1).choices(range(self.vocab), k=length))

    def add(self, ids: tuple[int, ...], max_tokens: int, *, store: bool) -> str:
        self.number += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        name = f"r{self.number}"
        self.engine.add(Request(name, ids, sampling, (len(self.document),), store=store))
        return name

    def first_token(self, ids: tuple[int, ...]) -> tuple[float, int]:
        """Seconds from the request to its first token, and tokens that were reused."""
        self.engine.flush()
        began = time.perf_counter()
        self.add(ids, 1, store=True)
        cached = 0
        while self.engine.has_work:
            for event in self.engine.step():
                if event.error is not None:
                    raise event.error
                cached = event.usage.cached_len
        return time.perf_counter() - began, cached

    def decode(self, ids: tuple[int, ...], steps: int) -> tuple[list[float], list[bool]]:
        """Seconds of decode steps, and which of them had something to write."""
        name = self.add(ids, steps + 4, store=False)
        for _ in range(3):
            self.engine.step()
        times, behind = [], []
        for _ in range(steps):
            behind.append(self.engine.is_behind)
            began = time.perf_counter()
            self.engine.step()
            times.append(time.perf_counter() - began)
        self.engine.cancel(name)
        return times, behind


def write(args: argparse.Namespace) -> dict[str, Any]:
    """The first process: fill, decode without and with writing behind, until all is durable."""
    work = Work(args)
    engine, lower = work.engine, work.engine.store.lower
    assert lower is not None
    fill(engine)
    ids = work.question()  # goes on from the document's pages while they are written
    alone = [*work.decode(ids, 60)[0], *work.decode(ids, 60)[0]]
    work.add(work.document, 1, store=True)
    while engine.has_work:
        engine.step()
    began = time.perf_counter()
    times, behind = work.decode(ids, args.steps)
    during = [seconds for seconds, busy in zip(times, behind, strict=True) if busy]
    engine.flush()
    seconds = time.perf_counter() - began
    after = work.decode(ids, 60)[0]
    trouble = lower.trouble
    written = dict(lower.events)
    engine.close()
    base, slow = statistics.fmean([*alone, *after]), statistics.fmean(during) if during else float("nan")
    num_bytes = written["disk_written_bytes"]
    found = {
        "load_s": work.load_s, "written_bytes": num_bytes, "write_s": seconds, "trouble": trouble,
        "steps_behind": len(during), "step_s": base, "step_behind_s": slow,
        "step_median_s": statistics.median([*alone, *after]),
        "step_behind_median_s": statistics.median(during) if during else float("nan"),
        "slowdown": slow / base - 1,
        "slowdown_of_40_layers_computed": (slow - base) / STEP_OF_40_LAYERS_S,
    }  # fmt: skip
    say(
        f"decode {1 / base:.1f} tok/s, {1 / slow:.1f} while writing behind ({len(during)} steps): "
        f"{100 * found['slowdown']:.1f} % slower, {1e3 * (slow - base):.2f} ms a step, which is "
        f"{100 * found['slowdown_of_40_layers_computed']:.1f} % of a step of 40 layers (computed)"
    )
    say(
        f"{num_bytes / MIB:.0f} MiB durable {seconds:.1f} s after the answer, {num_bytes / seconds / MIB:.0f} MiB/s"
    )
    return found


def disk_rate(files: Iterable[Path]) -> tuple[float, int, bool]:
    """Bytes a second of plain reads of these files by four threads, their bytes, and whether the page cache was passed
    by; else they were dropped from it before."""
    files = list(files)
    drop(files)
    direct = True

    def read(file: Path) -> int:
        nonlocal direct
        try:
            handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            direct, handle = False, os.open(file, os.O_RDONLY)
        size = os.fstat(handle).st_size
        with mmap.mmap(-1, round_up(size, 4096)) as buffer:
            os.preadv(handle, [buffer], 0)
        os.close(handle)
        return size

    began = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        total = sum(pool.map(read, files))
    return total / (time.perf_counter() - began), total, direct


def drop(files: Iterable[Path]) -> None:
    """Out of the page cache."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read(args: argparse.Namespace) -> dict[str, Any]:
    """The second process: questions about the document, from disk, from the device and from host memory."""
    work = Work(args, ram=args.ram)
    engine, store = work.engine, work.engine.store
    lower = store.lower
    assert lower is not None and isinstance(store._tier, ComputeTier)
    files = sorted((work.folder / "models").glob("*/*.safetensors"))  # the document's
    rates = [disk_rate(files) for _ in range(3)]
    found: dict[str, Any] = {
        "load_s": work.load_s, "files": len(files), "bytes": rates[0][1], "plain_direct": rates[0][2],
        "disk_bytes_s": [rate for rate, _, _ in rates],
    }  # fmt: skip
    if args.device != "cpu":
        found["link_bytes_s"] = link_rates(work.device)["copy_in"]
    for tier in ("disk", "device", "ram"):
        rows = []
        for _ in range(3):
            if tier == "disk":
                store.clear()
                drop(files)
            began = time.perf_counter()
            while tier == "ram" and store._evict_leaf():
                pass
            demote_s = time.perf_counter() - began
            before = dict(lower.events)
            seconds, cached = work.first_token(work.question())
            time.sleep(0.05)  # the thread that times copies may have a moment to go
            after = lower.events
            row = {name: after.get(name, 0) - before.get(name, 0) for name in
                   ("restore_microseconds", "restored_disk_bytes", "restored_ram_bytes", "restored_pinned_bytes",
                    "demoted_bytes", "unpinned_images")}  # fmt: skip
            row |= {name: count for name, count in lower.held.items() if name.startswith("ram_")}
            rows.append({"first_token_s": seconds, "cached": cached, "demote_s": demote_s, **row})
        found[tier] = rows
    found["direct"] = bool(lower.held["disk_direct_reads"])
    engine.close()
    report(found, args.tokens)
    return found


def report(found: dict[str, Any], tokens: int) -> None:
    """Lines for people."""
    tail = statistics.median(row["first_token_s"] for row in found["device"])
    disk = statistics.median(found["disk_bytes_s"])
    shown = ", ".join(f"{rate / MIB:.0f}" for rate in found["disk_bytes_s"])
    past = "past the page cache" if found["plain_direct"] else "dropped from the page cache before"
    say(f"disk: {shown} MiB/s of plain reads by four threads ({found['bytes'] / MIB:.0f} MiB, {past})")
    say(f"on the card: {tail * 1e3:.0f} ms to the first token of a question of 64 tokens")
    if "link_bytes_s" in found:
        say(f"link: {found['link_bytes_s'] / MIB:.0f} MiB/s of one large copy from pinned memory")
    for tier, name, link in (("disk", "restored_disk_bytes", disk), ("ram", "restored_ram_bytes", None)):
        for row in found[tier]:
            seconds = row["restore_microseconds"] / 1e6
            rate = row[name] / seconds if seconds else 0.0
            ceiling = link or found.get("link_bytes_s", 0.0)
            allowed = 1.2 * row[name] / ceiling + tail if ceiling else float("nan")
            row |= {"bytes_s": rate, "ratio": rate / ceiling if ceiling else None, "allowed_s": allowed}
            ratio = rate / ceiling if ceiling else float("nan")
            say(
                f"{tier}: {row['cached']:,} of {tokens:,} tokens, {row[name] / MIB:.0f} MiB in {seconds:.3f} s, "
                f"{rate / MIB:.0f} MiB/s = {ratio:.2f} of {'the disk' if link else 'the link'}; first token "
                f"{row['first_token_s']:.3f} s, 1.2 x bytes / rate + the tail is {allowed:.3f} s; left the card in "
                f"{row['demote_s']:.3f} s"
            )
            if tier == "ram":
                pinned, free = row.get("ram_pinned_bytes", 0), row.get("ram_pinned_free_bytes", 0)
                say(
                    f"ram: {row['restored_pinned_bytes'] / MIB:.0f} MiB of that from pinned images; host memory holds "
                    f"{row['ram_bytes'] / MIB:.0f} MiB, {pinned / MIB:.0f} of it pinned, {free / MIB:.0f} of which no "
                    f"image has"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=245_760, help="of the document, in whole pages")
    parser.add_argument("--kv", default="fp8")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vram", type=parse_bytes, help="cap on the card, such as 10.4GiB")
    parser.add_argument("--ram", type=int, default=2 * GIB)
    parser.add_argument("--steps", type=int, default=200, help="decode steps beside the writing")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: a temporary one")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--only", choices=("write", "read"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tokens % 64:
        parser.error("--tokens in whole pages of 64")
    if args.only:
        print(json.dumps({"write": write, "read": read}[args.only](args)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.folder, began = Path(folder), time.perf_counter()
        size = synthesize(args.folder / LIKE, LIKE, "int4", layers=args.layers)
        say(f"made {args.layers} of 40 layers, {size / MIB:.0f} MiB, in {time.perf_counter() - began:.0f} s")
        document: dict[str, Any] = {
            "settings": {k: str(v) for k, v in vars(args).items()},
            "made_bytes": size,
        }
        names = ("layers", "tokens", "kv", "dtype", "device", "ram", "steps", "folder")
        options = [f"--{name}={getattr(args, name)}" for name in names]
        options += [] if args.vram is None else [f"--vram={args.vram}"]
        for part in ("write", "read"):
            began = time.perf_counter()
            command = [sys.executable, __file__, *options, f"--only={part}"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            document[part] = json.loads(done.stdout.splitlines()[-1])
            say(
                f"{part}: {time.perf_counter() - began:.0f} s in all, {document[part]['load_s']:.0f} s of it loading"
            )
    document |= origin(sys.argv)
    if args.report is not None:
        args.report.write_text(json.dumps(document, indent=1, default=str) + "\n")
    print(json.dumps(document, default=str))


if __name__ == "__main__":
    main()
