"""bench offline where only torch is installed: a model in a folder, or random weights made up on the spot.

    PYTHONPATH=src python benchmarks/offline.py --like qwen3.6-35b-a3b --router zipf --vram 10.4GiB \\
        --contexts 245760 --kv fp8 --fill-kv --report FILE

Prints what `packhorse bench offline` prints, and takes its options; docs/bench.md says what is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from packhorse.bench.offline import Settings, measure
from packhorse.bench.origin import origin
from packhorse.bench.report import table
from packhorse.bench.synth import synthesize
from packhorse.core.config import EngineConfig
from packhorse.core.units import format_bytes, parse_bytes
from packhorse.facts.read import read_model


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def caps(text: str) -> tuple[int | None, ...]:
    return tuple(None if part == "none" else parse_bytes(part) for part in text.split(","))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--like")
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--router", default="uniform")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda")
    for name in ("kv", "dtype", "weights"):
        parser.add_argument(f"--{name}", default="auto")
    for name in ("threads", "as-arch"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--vram", type=caps, default=(None,), help="sizes by commas; none: no cap")
    parser.add_argument("--contexts", type=numbers, default=Settings.contexts)
    parser.add_argument("--sequences", type=numbers, default=Settings.sequences)
    for name in ("decode", "warmup", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings, name))
    parser.add_argument("--fill-kv", action="store_true")
    parser.add_argument("--own-tokens", action="store_true")
    parser.add_argument("--tails", type=numbers, default=())
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    if (args.model is None) == (args.like is None):
        parser.error("give a folder or --like NAME")
    fields = ("kv", "dtype", "weights", "device", "as_arch", "threads")
    config = EngineConfig(**{name: getattr(args, name) for name in fields})
    names = (
        "contexts",
        "sequences",
        "decode",
        "warmup",
        "vram",
        "fill_kv",
        "own_tokens",
        "tails",
        "beside",
        "seed",
    )
    settings = Settings(**{name: getattr(args, name) for name in names})
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:
            model, began = Path(folder, args.like), time.perf_counter()
            size = synthesize(
                model, args.like, args.recipe, router=args.router, layers=args.layers, seed=args.seed
            )
            say(f"made {format_bytes(size)} in {time.perf_counter() - began:.0f} s")
        document = measure(read_model(model), config, settings, say) | origin(sys.argv)
    if args.report is not None:
        args.report.write_text(json.dumps(document, indent=1, default=str) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
