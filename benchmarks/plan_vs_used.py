"""What was planned of a card's bytes and time against what is taken: 20 loads of models in true shapes, fewer layers.

    PYTHONPATH=src python benchmarks/plan_vs_used.py [--report FILE] [--only 2,7]

Each load runs the plan's own settings in a process of its own, so that the driver's figure of a process is its own;
five load at once and are then timed one after the other. Bytes: what `packhorse plan` says (`plan`) and what the engine
planned as it loaded (`engine`) beside `used` by the driver. Times: what the plan predicts for the profile of the card
beside those measured. Its free numbers, and the CUDA context's bytes, are fitted to the five loads marked * first; they
are printed as facts/calibration.json has them. Ends with exit code 1 where a load is off by more than 2 % in bytes, or
more than 3 of the other 15 by more than 15 % in time.

`--dry` runs two small loads on the CPU, fits nothing and judges nothing. `--again REPORT` judges anew, without a card,
what a report holds; with `--adopt` the fitted numbers become what facts/calibration.json expects.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packhorse.bench.synth import synthesize
from packhorse.core.config import EngineConfig
from packhorse.core.types import PAGE_LEN
from packhorse.core.units import GIB, MIB, round_up
from packhorse.facts.config_json import config_fields
from packhorse.facts.known import known_config
from packhorse.facts.machine import Machine, calibration, read_profile, this_machine
from packhorse.facts.model import ModelFacts
from packhorse.facts.read import read_model
from packhorse.facts.recipes import as_stored, recipe
from packhorse.plan.place import Placement, place
from packhorse.plan.predict import EXPECTED, predict
from packhorse.plan.report import to_document
from packhorse.plan.solve import Plan, Wishes, solve

DENSE, HYBRID = ("qwen3-32b", "int4", 4), ("qwen3.6-27b", "int4", 8)
HYBRID_MOE, MOE = ("qwen3.6-35b-a3b", "int4", 8), ("qwen3-30b-a3b", "int8", 6)
BYTES_BOUND, TIME_BOUND, TIME_MISSES = 0.02, 0.15, 3
PROMPT_LEN = 8192
WARMUP, DECODE = 200, 100
ROOM = round_up(WARMUP + DECODE + 2, PAGE_LEN)
AT_ONCE, THREADS = 5, 3
ROOMY = 24 * GIB
PROFILE = "h200"
CALIBRATION = Path(__file__).parents[1] / "src/packhorse/facts/calibration.json"


@dataclass(frozen=True)
class Load:
    """One combination. like: model, recipe, layers. held: part of the routed experts that the cap leaves room for."""

    like: tuple[str, str, int]
    context: int
    sequences: int
    kv: str | None
    held: float = 1.0
    fitted: bool = False

    @property
    def prompt(self) -> int:
        """Tokens of the prompt that is read."""
        return min(PROMPT_LEN, self.context)

    def wishes(self, vram: int | None) -> Wishes:
        return Wishes(self.context + ROOM, self.sequences, self.kv, vram=vram)

    def plan(self, facts: ModelFacts, machine: Machine) -> Plan:
        """The plan for this load: with the lowest cap, in MiB, under which so many experts are on the card."""
        if machine.card is None:
            return solve(facts, machine, self.wishes(None))
        low, high = 0, ROOMY // MIB
        while self.held < 1 and high - low > 1:
            middle = (low + high) // 2
            found = solve(facts, machine, self.wishes(middle * MIB)).placement
            enough = found.fits and found.on_device >= self.held * found.num_units
            low, high = (low, middle) if enough else (middle, high)
        return solve(facts, machine, self.wishes(high * MIB))

    def __str__(self) -> str:
        name, recipe, layers = self.like
        cap = f", {self.held:.0%} of experts" if self.held < 1 else ""
        return f"{name} {recipe} {layers} layers, {self.context:,} x {self.sequences}, {self.kv}{cap}"


LOADS = [
    Load(DENSE, 8192, 1, "bf16", fitted=True),
    Load(DENSE, 32768, 1, "fp8"),
    Load(DENSE, 32768, 4, "fp8"),
    Load(DENSE, 16384, 2, "k5v4"),
    Load(DENSE, 8192, 8, "fp8"),
    Load(HYBRID, 32768, 1, "fp8"),
    Load(HYBRID, 131072, 1, "fp8", fitted=True),
    Load(HYBRID, 245440, 1, "k4v4"),
    Load(HYBRID, 65536, 4, "fp8"),
    Load(HYBRID, 16384, 2, "bf16"),
    Load(HYBRID_MOE, 8192, 1, "fp8"),
    Load(HYBRID_MOE, 245440, 1, "fp8"),
    Load(HYBRID_MOE, 245440, 1, "fp8", 0.37, fitted=True),
    Load(HYBRID_MOE, 32768, 2, "fp8", 0.5),
    Load(HYBRID_MOE, 131072, 1, "k5v4", 0.7),
    Load(HYBRID_MOE, 32768, 4, "fp8", fitted=True),
    Load(MOE, 8192, 1, "bf16"),
    Load(MOE, 32768, 1, "fp8", 0.5, fitted=True),
    Load(MOE, 16384, 4, "fp8", 0.4),
    Load(MOE, 32768, 2, "k4v4"),
]
TINY = ("qwen3.5-0.8b", "int8", 4)
DRY = [Load(TINY, 256, 1, None), Load(TINY, 512, 2, "fp8")]


def child(folder: Path, settings: dict[str, Any], load: Load) -> None:
    """Load, say so, wait to be asked, time, print what was found."""
    from packhorse.bench.offline import Mute, Run, Settings, memory
    from packhorse.engine.load import load_engine

    config = EngineConfig(**settings)
    began = time.perf_counter()
    loaded = load_engine(read_model(folder), config, Mute)
    load_s = time.perf_counter() - began
    print(json.dumps({"loaded": load_s}), flush=True)
    sys.stdin.readline()
    ceilings = dict.fromkeys(("vram", "memory", "host", "disk", "products"), 1.0)
    counts = {"decode": DECODE, "warmup": WARMUP} if config.device != "cpu" else {"decode": 5, "warmup": 1}
    timed = Settings((load.context,), (load.sequences,), **counts)
    run = Run(loaded, config, timed, ceilings)
    run.read(run.prompt(load.prompt, 1000))  # what is loaded at the first use
    run.engine.store.clear()
    prefill_s, _ = run.read(run.prompt(load.prompt, 2000))
    run.engine.store.clear()
    run = Run(loaded, config, replace(timed, fill_kv=True), ceilings)
    row = run.decode(load.context, [run.prompt(load.context, number) for number in range(load.sequences)])
    print(json.dumps({
        "load_s": load_s, "memory": memory(loaded, config), "sizes": asdict(loaded.sizes), "prefill_s": prefill_s,
        "step_s": row["step_s"]["p50"], "experts": row["experts"],
    }))  # fmt: skip


def make(folder: Path, like: tuple[str, str, int]) -> Path:
    """A model of these shapes in a folder of its own."""
    name, recipe, layers = like
    synthesize(folder / name, name, recipe, layers=layers)
    return folder / name


def run_loads(
    loads: list[Load], folders: dict[tuple[str, str, int], Path], settings: dict[int, dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """What each child found, by number; `error` where one failed."""
    found: dict[int, dict[str, Any]] = {}
    dry = ["--dry"] if loads is DRY else []
    chosen = list(settings)
    for batch in (chosen[first : first + AT_ONCE] for first in range(0, len(chosen), AT_ONCE)):
        children, logs = {}, {}
        for index in batch:
            words = [
                sys.executable,
                __file__,
                "--child",
                str(folders[loads[index].like]),
                "--only",
                str(index + 1),
            ]
            words += ["--settings", json.dumps(settings[index]), *dry]
            # A file holds what a pipe would stop at while nobody reads it.
            logs[index] = tempfile.TemporaryFile("w+")  # noqa: SIM115
            children[index] = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                               stderr=logs[index])  # fmt: skip
        for process in children.values():
            assert process.stdout is not None
            process.stdout.readline()
        for index, process in children.items():
            out = ""
            with suppress(BrokenPipeError):
                out, _ = process.communicate("go\n")
            with logs[index] as log:
                log.seek(0)
                errors = log.read()
            try:
                found[index] = json.loads(out)
            except ValueError:
                found[index] = {"error": errors.strip().splitlines()[-1:] or ["no answer"]}
            print(f"{index + 1:>2} {loads[index]}: {'done' if 'memory' in found[index] else found[index]}",
                  file=sys.stderr, flush=True)  # fmt: skip
    return found


class Predictor:
    """Times of loads as functions of the calibration's free numbers. machines: as each load's plan has it."""

    names = (
        "vram",
        "vram_experts",
        "vram_kv",
        "link",
        "tensor",
        "tensor_experts",
        "kernel_us",
        "step_us",
        "sequence_us",
        "chunk_us",
        "row_passes",
    )
    WEIGHT = 0.6
    """Of what a number leaves its start by, beside what a load is off by: for numbers that the loads say nothing of."""

    def __init__(self, loads: list[Load], machines: dict[int, Machine], plans: dict[int, Plan]) -> None:
        self.loads, self.machines, self.plans = loads, machines, plans
        self.start = [float(self._entry(name)["values"][EXPECTED]) for name in self.names]
        self.values = list(self.start)
        self._placed: dict[int, Placement] = {}

    @staticmethod
    def _entry(name: str) -> dict[str, Any]:
        data = calibration()
        found: dict[str, Any] = data["fractions"].get(name) or data[name]
        return found

    def placement(self, index: int) -> Placement:
        """As planned, with the context that was measured."""
        if index not in self._placed:
            plan = self.plans[index]
            job = replace(plan.placement.job, chunk_len=plan.placement.chunk_len)
            self._placed[index] = place(plan.footprint, self.machines[index], job)
        return self._placed[index]

    def times(self, index: int) -> tuple[float, float]:
        """(prefill, decode step), seconds."""
        for name, value in zip(self.names, self.values, strict=True):
            self._entry(name)["values"][EXPECTED] = value
        load, where, footprint = self.loads[index], self.placement(index), self.plans[index].footprint
        alone = replace(where, job=replace(where.job, context=load.prompt, sequences=1))
        held = replace(where, job=replace(where.job, context=load.context))
        read = predict(footprint, self.machines[index], alone)
        decode = predict(footprint, self.machines[index], held)
        return read.cold_first_token_s, load.sequences / decode.decode_tok_s_total

    def fit(self, measured: dict[int, tuple[float, float]]) -> None:
        """The free numbers for which the sum of squared logarithms of predicted over measured (prefill, step) is least:
        damped steps of Newton's kind (Levenberg, Marquardt) in the numbers' logarithms."""
        if not measured:
            return
        at, damping = np.log(self.values), 1e-2
        misses = self._misses(at, measured)
        for _ in range(60):
            nudged = [self._misses(at + 1e-3 * one, measured) for one in np.eye(len(at))]
            slope = (np.array(nudged) - misses).T / 1e-3
            pull = slope.T @ slope + damping * np.eye(len(at))
            to = at - np.linalg.solve(pull, slope.T @ misses)
            then = self._misses(to, measured)
            if then @ then < misses @ misses:
                at, misses, damping = to, then, damping / 3
            else:
                damping *= 4
        self.values = [float(value) for value in np.exp(at)]

    def _misses(
        self, at: NDArray[np.float64], measured: dict[int, tuple[float, float]]
    ) -> NDArray[np.float64]:
        """Logarithms of predicted over measured, prefill and step of each, and how far the numbers left their start."""
        self.values = [float(value) for value in np.exp(at)]
        off = [np.log(np.array(self.times(index)) / np.array(pair)) for index, pair in measured.items()]
        return np.concatenate([*off, self.WEIGHT * (at - np.log(self.start))])


def measured_rates() -> dict[str, float]:
    """What plain kernels reach on this card, beside what its profile says."""
    import torch

    from packhorse.bench.card import link_rates, product_rate

    device = torch.device("cuda", 0)
    return link_rates(device) | {"products": product_rate(device, torch.float16, 8192)}


def fit_context(found: dict[int, dict[str, Any]], fitted: list[int]) -> None:
    """Have the calibration say what the CUDA context took in the fitted loads."""
    taken = [found[index]["sizes"]["runtime_bytes"] for index in fitted]
    sizes = calibration()["device_mib"]
    if taken:
        sizes["context"] = int(statistics.median(taken)) // MIB - sizes["modules"] - sizes["allocator"]


def rows(
    loads: list[Load], machines: dict[int, Machine], plans: dict[int, Plan], found: dict[int, dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row a load, and the fitted numbers."""
    whole = [index for index in found if "memory" in found[index]]
    fitted = [index for index in whole if loads[index].fitted]
    fit_context(found, fitted)
    predictor = Predictor(loads, machines, plans)
    predictor.fit({index: (found[index]["prefill_s"], found[index]["step_s"]) for index in fitted})
    table = []
    for index in sorted(found):
        load, one = loads[index], found[index]
        row: dict[str, Any] = {"number": index + 1, "load": str(load), "fitted": load.fitted}
        if index not in whole:
            table.append(row | one)
            continue
        prefill, step = predictor.times(index)
        where, used = predictor.placement(index), one["memory"]["used_bytes"]
        tier = where.tiers["host" if machines[index].card is None else "device0"]
        planned = {"engine": one["memory"]["planned_bytes"], "plan": tier.total_bytes}
        row |= {
            "used_bytes": used,
            "cap_bytes": tier.cap_bytes,
            "chunk_len": where.chunk_len,
            "load_s": one["load_s"],
        }
        for name, size in planned.items():
            row |= {f"{name}_bytes": size, f"{name}_off": size / used - 1}
        row |= {"step_s": one["step_s"], "step_predicted_s": step, "step_off": step / one["step_s"] - 1}
        row |= {"prefill_s": one["prefill_s"], "prefill_predicted_s": prefill,
                "prefill_off": prefill / one["prefill_s"] - 1}  # fmt: skip
        row |= {"hit_rate": None if one["experts"] is None else one["experts"]["hit_rate"], "raw": one}
        row["vram"] = tier.cap_bytes
        row["hit_rate_planned"] = where.on_device / where.num_units if where.num_units else None
        table.append(row)
    return table, dict(zip(predictor.names, predictor.values, strict=True))


def verdicts(table: list[dict[str, Any]]) -> dict[str, Any]:
    """How many loads keep to the bounds."""
    whole = [row for row in table if "used_bytes" in row]
    others = [row for row in whole if not row["fitted"]]
    return {
        "loads": len(table),
        "ran": len(whole),
        "engine_bytes_within": sum(abs(row["engine_off"]) <= BYTES_BOUND for row in whole),
        "plan_bytes_within": sum(abs(row["plan_off"]) <= BYTES_BOUND for row in whole),
        "not_fitted": len(others),
        "step_within": sum(bool(abs(row["step_off"]) <= TIME_BOUND) for row in others),
        "prefill_within": sum(bool(abs(row["prefill_off"]) <= TIME_BOUND) for row in others),
    }


def print_table(table: list[dict[str, Any]]) -> None:
    """As Markdown."""
    print(
        "| | load | cap, chunk | plan | engine | used, MiB | plan off | engine off | step, ms | off | prefill, s | off "
        "| hits, planned | load, s |"
    )
    print("|---" * 14 + "|")
    for row in table:
        mark = f"{row['number']}{'*' if row['fitted'] else ''}"
        if "used_bytes" not in row:
            print(f"| {mark} | {row['load']} | failed: {row['error']} |" + " |" * 11)
            continue
        sizes = " | ".join(f"{row[name + '_bytes'] / MIB:.0f}" for name in ("plan", "engine", "used"))
        hits = "" if row["hit_rate"] is None else f"{row['hit_rate']:.3f}, {row['hit_rate_planned']:.3f}"
        off = {name: f"{row[name + '_off']:+.1%}" for name in ("engine", "plan", "step", "prefill")}
        print(
            f"| {mark} | {row['load']} | {row['cap_bytes'] / MIB:.0f}, {row['chunk_len']:,} | {sizes} | {off['plan']} "
            f"| {off['engine']} | {1e3 * row['step_s']:.3f} | {off['step']} | {row['prefill_s']:.3f} "
            f"| {off['prefill']} | {hits} | {row['load_s']:.1f} |"
        )


def shapes(like: tuple[str, str, int]) -> ModelFacts:
    """What would be read of a model's files."""
    name, own, layers = like
    config = known_config(name)
    text = config.get("text_config", config)
    text["num_hidden_layers"] = layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    facts = ModelFacts(name=name, path=Path(name), container="config", **config_fields(config, Path(name)))
    return as_stored(facts, recipe(own))


def again(report: Path) -> tuple[dict[int, Plan], dict[int, dict[str, Any]]]:
    """Plans and findings of a report."""
    plans, found, machine = {}, {}, read_profile(PROFILE)
    for row in json.loads(report.read_text())["rows"]:
        index = row["number"] - 1
        found[index] = row.get("raw") or {"error": row["error"]}
        vram = row.get("vram", ROOMY)
        plans[index] = solve(shapes(LOADS[index].like), machine, LOADS[index].wishes(vram))
    return plans, found


def adopt(fitted: dict[str, float], context: int) -> None:
    """Have facts/calibration.json expect what was fitted; low and high give way where they must."""
    document = json.loads(CALIBRATION.read_text())
    for name, value in fitted.items():
        entry = document["fractions"].get(name) or document[name]
        low, _, high = entry["values"]
        value = float(f"{value:.3g}")
        entry["values"] = [min(low, value), value, max(high, value)]
        entry["source"] = (
            f"one H200, {time.strftime('%d %B %Y')}: fitted to five loads of benchmarks/plan_vs_used.py"
        )
    document["device_mib"]["context"] = context
    document["date"] = time.strftime("%Y-%m-%d")
    CALIBRATION.write_text(json.dumps(document, indent=1) + "\n")
    print("The tables of docs/plan.md follow by: python tests/cpu/test_plan.py --write", file=sys.stderr)


def measure(
    loads: list[Load], chosen: list[int], *, dry: bool
) -> tuple[dict[int, Plan], dict[int, dict[str, Any]], dict[str, float]]:
    """Plans and findings of loads that are run here, and rates of the card."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        likes = list({loads[index].like for index in chosen})
        with ProcessPoolExecutor(len(likes)) as pool:
            folders = dict(zip(likes, pool.map(make, itertools.repeat(Path(name)), likes), strict=True))
        print(f"models made in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        machine = replace(this_machine(Path(name)), card=None) if dry else read_profile(PROFILE)
        facts = {like: read_model(folder) for like, folder in folders.items()}
        plans = {index: loads[index].plan(facts[loads[index].like], machine) for index in chosen}
        settings = {}
        for index, plan in plans.items():
            engine = to_document(plan, plan.facts.name)["engine"]
            assert engine is not None, (loads[index], plan.unbuilt, plan.placement.shortfall)
            settings[index] = {**engine, "threads": 1 if dry else THREADS, "ram": 0}
        rates = {} if dry else measured_rates()
        return plans, run_loads(loads, folders, settings), rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="numbers of loads, by commas")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--dry", action="store_true", help="two small loads on the CPU")
    parser.add_argument("--again", type=Path, metavar="REPORT", help="judge what a report holds")
    parser.add_argument("--adopt", action="store_true", help="write the fitted numbers into the calibration")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    loads = DRY if args.dry else LOADS
    chosen = [int(part) - 1 for part in args.only.split(",")] if args.only else list(range(len(loads)))
    if args.child is not None:
        child(args.child, args.settings, loads[chosen[0]])
        return
    began = time.perf_counter()
    rates: dict[str, float] = {}
    if args.again is not None:
        plans, found = again(args.again)
    else:
        plans, found, rates = measure(loads, chosen, dry=args.dry)
    machines = {index: plan.machine for index, plan in plans.items()}
    table, fitted = rows(loads, machines, plans, found)
    told = verdicts(table)
    context = calibration()["device_mib"]["context"]
    if args.adopt:
        adopt(fitted, context)
    if args.report is not None:
        args.report.write_text(json.dumps({"rates": rates, "fitted": fitted, "context_mib": context, "verdicts": told,
                                           "rows": table}, indent=1, default=str))  # fmt: skip
    print(f"rates, GB/s: {', '.join(f'{name} {rate / 1e9:.1f}' for name, rate in rates.items())}")
    print(
        f"fitted: {', '.join(f'{name} {value:.3g}' for name, value in fitted.items())}, context {context} MiB"
    )
    print_table(table)
    print(f"{told}, {time.perf_counter() - began:.0f} s in all")
    missed = told["not_fitted"] - min(told["step_within"], told["prefill_within"])
    if not args.dry and (told["engine_bytes_within"] < told["loads"] or missed > TIME_MISSES):
        sys.exit(1)


if __name__ == "__main__":
    main()
