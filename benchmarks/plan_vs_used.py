"""What was planned of a card's bytes and time against what is taken: 20 loads of models in true shapes, fewer layers.

    PYTHONPATH=src python benchmarks/plan_vs_used.py [--report FILE] [--only 2,7]

Each load is a process of its own, so that the driver's figure of a process is its own; five load at once and are then
timed one after the other. Bytes: `engine`, what the engine planned before loading, and `plan`, what `packhorse plan`
says of the same wishes, beside `used` by NVML. Times: the plan's predictor over what the engine holds, with rates
measured here and its free numbers (fractions of the rates of memory, link and products, time of a kernel, and of a step
outside the card) fitted to the five loads marked *, beside those measured. Ends with exit code 1 where a load is off by
more than 2 % in bytes, or more than 3 of the other 15 by more than 15 % in time.
"""

from __future__ import annotations

import argparse
import itertools
import json
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
from packhorse.plan.size import Sizes, size_engine

from packhorse.bench.synth import synthesize
from packhorse.core.config import EngineConfig
from packhorse.core.units import MIB, round_up
from packhorse.facts.machine import Machine, calibration, read_profile
from packhorse.facts.model import ModelFacts
from packhorse.facts.read import read_model
from packhorse.facts.recipes import Recipe
from packhorse.plan import account
from packhorse.plan.place import Footprint, Job, Placement, Tier
from packhorse.plan.predict import EXPECTED, predict
from packhorse.plan.solve import Wishes, solve

DENSE, HYBRID = ("qwen3-32b", "int4", 4), ("qwen3.6-27b", "int4", 8)
HYBRID_MOE, MOE = ("qwen3.6-35b-a3b", "int4", 8), ("qwen3-30b-a3b", "int8", 6)
BYTES_BOUND, TIME_BOUND, TIME_MISSES = 0.02, 0.15, 3
PROMPT_LEN = 8192
ROOM = 128
AT_ONCE = 5
PROFILE = "h200"


@dataclass(frozen=True)
class Load:
    """One combination. like: model, recipe, layers. held: part of the routed experts that the cap leaves room for."""

    like: tuple[str, str, int]
    context: int
    sequences: int
    kv: str
    held: float = 1.0
    fitted: bool = False

    @property
    def config(self) -> EngineConfig:
        pool = self.sequences * round_up(self.context + ROOM, 64)
        return EngineConfig(
            device="cuda", dtype="fp16", kv=self.kv, context=self.context + ROOM, sequences=self.sequences,
            kv_tokens=pool, threads=2, snapshots=2 * self.sequences,
        )  # fmt: skip

    def __str__(self) -> str:
        name, recipe, layers = self.like
        cap = f", {self.held:.0%} of experts" if self.held < 1 else ""
        return f"{name} {recipe} {layers} layers, {self.context:,} x {self.sequences}, {self.kv}{cap}"


LOADS = [
    Load(DENSE, 8192, 1, "fp16"),
    Load(DENSE, 32768, 1, "fp8", fitted=True),
    Load(DENSE, 32768, 4, "fp8"),
    Load(DENSE, 16384, 2, "k5v4"),
    Load(DENSE, 8192, 8, "fp8"),
    Load(HYBRID, 32768, 1, "fp8"),
    Load(HYBRID, 131072, 1, "fp8", fitted=True),
    Load(HYBRID, 245760, 1, "k4v4"),
    Load(HYBRID, 65536, 4, "fp8"),
    Load(HYBRID, 16384, 2, "fp16"),
    Load(HYBRID_MOE, 8192, 1, "fp8"),
    Load(HYBRID_MOE, 245760, 1, "fp8", fitted=True),
    Load(HYBRID_MOE, 245760, 1, "fp8", 0.37, fitted=True),
    Load(HYBRID_MOE, 32768, 2, "fp8", 0.5),
    Load(HYBRID_MOE, 131072, 1, "k5v4", 0.7),
    Load(HYBRID_MOE, 32768, 4, "fp8"),
    Load(MOE, 8192, 1, "fp16"),
    Load(MOE, 32768, 1, "fp8", 0.5, fitted=True),
    Load(MOE, 16384, 4, "fp8", 0.3),
    Load(MOE, 32768, 2, "k4v4"),
]


def cap_of(load: Load, facts: ModelFacts, available: int) -> int | None:
    """Bytes of the card that leave room for `held` of the experts, by the engine's own sizes."""
    if load.held == 1:
        return None
    whole = size_engine(facts, load.config, "fp16", available)
    experts = account.packed_expert_bytes(facts)
    buffers = 2 * experts // sum(facts.moe_layers)
    return whole.total_bytes + whole.runtime_bytes - int((1 - load.held) * experts) + buffers


def child(folder: Path, index: int) -> None:
    """Load, say so, wait to be asked, time, print what was found."""
    import torch

    from packhorse.bench.offline import Mute, Run, Settings, memory
    from packhorse.engine.load import load_engine

    load, facts = LOADS[index], read_model(folder)
    config = replace(load.config, vram=cap_of(load, facts, torch.cuda.mem_get_info()[0]))
    began = time.perf_counter()
    loaded = load_engine(facts, config, Mute)
    load_s = time.perf_counter() - began
    print(json.dumps({"loaded": load_s}), flush=True)
    sys.stdin.readline()
    ceilings = dict.fromkeys(("vram", "host", "disk", "products"), 1.0)
    settings = Settings((load.context,), (load.sequences,), decode=40, warmup=20, seed=index)
    run = Run(loaded, config, settings, ceilings)
    prompt = min(PROMPT_LEN, load.context)
    run.read(run.prompt(prompt, 1000))  # what is loaded at the first use
    run.engine.store.clear()
    prefill_s = run.read(run.prompt(prompt, 2000))
    run.engine.store.clear()
    run = Run(loaded, config, replace(settings, fill_kv=True), ceilings)
    row = run.decode(load.context, [run.prompt(load.context, number) for number in range(load.sequences)])
    print(json.dumps({
        "vram": config.vram, "load_s": load_s, "memory": memory(loaded, config), "sizes": asdict(loaded.sizes),
        "prompt": prompt, "prefill_s": prefill_s, "step_s": row["step_s"]["p50"], "experts": row["experts"],
    }))  # fmt: skip


def make(folder: Path, like: tuple[str, str, int]) -> Path:
    """A model of these shapes in a folder of its own."""
    name, recipe, layers = like
    synthesize(folder / name, name, recipe, layers=layers)
    return folder / name


def run_loads(folders: dict[tuple[str, str, int], Path], chosen: list[int]) -> dict[int, dict[str, Any]]:
    """What each child found, by number; `error` where one failed."""
    found: dict[int, dict[str, Any]] = {}
    for first in range(0, len(chosen), AT_ONCE):
        batch = chosen[first : first + AT_ONCE]
        children, logs = {}, {}
        for index in batch:
            words = [
                sys.executable,
                __file__,
                "--child",
                str(folders[LOADS[index].like]),
                "--only",
                str(index + 1),
            ]
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
            print(f"{index + 1:>2} {LOADS[index]}: {'done' if 'memory' in found[index] else found[index]}",
                  file=sys.stderr, flush=True)  # fmt: skip
    return found


def placement_of(load: Load, facts: ModelFacts, sizes: Sizes, context: int, sequences: int) -> Placement:
    """What the engine holds, as the predictor takes it."""
    num = sum(facts.moe_layers) * (facts.moe.num_experts if facts.moe else 0)
    on_card = num if sizes.expert_slots is None else min(num, sizes.expert_slots)
    kept = num if sizes.expert_slots is None else 0
    return Placement(
        Job(context, sequences, load.kv), {"device0": Tier(0, {})}, num_units=num, on_device=on_card, kept=kept,
        in_host=num, sweep_len=65_536,
    )  # fmt: skip


class Predictor:
    """Times of loads as functions of the calibration's free numbers."""

    names = ("vram", "link", "tensor", "kernel_us", "step_us")
    start = (0.7, 0.9, 0.5, 2.0, 300.0)

    def __init__(
        self, machine: Machine, facts: dict[int, ModelFacts], found: dict[int, dict[str, Any]]
    ) -> None:
        self.machine, self.facts, self.found = machine, facts, found
        packed = Recipe("packed", "fp16", from_files=True)
        self.footprints = {index: Footprint(one, packed, 1) for index, one in facts.items()}
        self.values = list(self.start)

    def times(self, index: int) -> tuple[float, float]:
        """(prefill, decode step), seconds."""
        load, facts, found = LOADS[index], self.facts[index], self.found[index]
        data = calibration()
        for name, value in zip(self.names, self.values, strict=True):
            if name in data["fractions"]:
                data["fractions"][name]["values"][EXPECTED] = value
        data["kernel_us"]["values"][EXPECTED] = self.values[3]
        names = Sizes.__dataclass_fields__
        sizes = Sizes(**{name: found["sizes"][name] for name in names})
        footprint = self.footprints[index]
        step = self.values[4] * 1e-6
        read = predict(footprint, self.machine, placement_of(load, facts, sizes, found["prompt"], 1))
        decode = predict(
            footprint, self.machine, placement_of(load, facts, sizes, load.context, load.sequences)
        )
        return read.cold_first_token_s + step, load.sequences / decode.decode_tok_s_total + step

    def fit(self, indices: list[int]) -> None:
        """The free numbers for which the sum of squared logarithms of predicted over measured is least: damped steps
        of Newton's kind (Levenberg, Marquardt) in the numbers' logarithms."""
        if not indices:
            return
        at, damping = np.log(self.values), 1e-2
        misses = self._misses(at, indices)
        for _ in range(60):
            nudged = [self._misses(at + 1e-3 * one, indices) for one in np.eye(len(at))]
            slope = (np.array(nudged) - misses).T / 1e-3
            pull = slope.T @ slope + damping * np.eye(len(at))
            to = at - np.linalg.solve(pull, slope.T @ misses)
            then = self._misses(to, indices)
            if then @ then < misses @ misses:
                at, misses, damping = to, then, damping / 3
            else:
                damping *= 4
        self.values = [float(value) for value in np.exp(at)]

    def _misses(self, at: NDArray[np.float64], indices: list[int]) -> NDArray[np.float64]:
        """Logarithms of predicted over measured, prefill and step of each."""
        self.values = [float(value) for value in np.exp(at)]
        pairs = [
            (predicted, measured)
            for index in indices
            for predicted, measured in zip(
                self.times(index), (self.found[index]["prefill_s"], self.found[index]["step_s"]), strict=True
            )
        ]
        return np.log([predicted / measured for predicted, measured in pairs])


def measured_machine() -> tuple[Machine, dict[str, float]]:
    """The profile with what this card's memory and link were found to carry."""
    import torch

    from packhorse.bench.card import link_rates, product_rate

    device = torch.device("cuda", 0)
    rates = link_rates(device) | {"products": product_rate(device, torch.float16, 8192)}
    machine = read_profile(PROFILE)
    assert machine.card is not None
    card = replace(machine.card, read_rate=rates["vram"], flops=rates["products"])
    return replace(machine, card=card, link_rate=rates["host"]), rates


def rows(
    machine: Machine, facts: dict[int, ModelFacts], found: dict[int, dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row a load, and the fitted numbers."""
    whole = [index for index in found if "memory" in found[index]]
    predictor = Predictor(machine, facts, found)
    predictor.fit([index for index in whole if LOADS[index].fitted])
    table = []
    for index in sorted(found):
        load, row = (
            LOADS[index],
            {"number": index + 1, "load": str(LOADS[index]), "fitted": LOADS[index].fitted},
        )
        if index not in whole:
            table.append(row | found[index])
            continue
        one = found[index]
        prefill, step = predictor.times(index)
        wishes = Wishes(load.context + ROOM, load.sequences, load.kv, "packed", vram=one["vram"])
        tiers = solve(facts[index], machine, wishes).placement.tiers
        sizes = {"engine": one["memory"]["planned_bytes"], "plan": tiers["device0"].total_bytes,
                 "used": one["memory"]["used_bytes"]}  # fmt: skip
        row |= {f"{name}_bytes": size for name, size in sizes.items()}
        row |= {
            "bytes_off": sizes["engine"] / sizes["used"] - 1,
            "plan_off": sizes["plan"] / sizes["used"] - 1,
        }
        row |= {"step_s": one["step_s"], "step_predicted_s": step, "step_off": step / one["step_s"] - 1}
        row |= {"prefill_s": one["prefill_s"], "prefill_predicted_s": prefill,
                "prefill_off": prefill / one["prefill_s"] - 1}  # fmt: skip
        row |= {"hit_rate": None if one["experts"] is None else one["experts"]["hit_rate"], "raw": one}
        table.append(row)
    return table, dict(zip(predictor.names, predictor.values, strict=True))


def verdicts(table: list[dict[str, Any]]) -> dict[str, Any]:
    """How many loads keep to the bounds."""
    whole = [row for row in table if "used_bytes" in row]
    others = [row for row in whole if not row["fitted"]]
    return {
        "loads": len(table),
        "ran": len(whole),
        "engine_bytes_within": sum(abs(row["bytes_off"]) <= BYTES_BOUND for row in whole),
        "plan_bytes_within": sum(abs(row["plan_off"]) <= BYTES_BOUND for row in whole),
        "not_fitted": len(others),
        "step_within": sum(bool(abs(row["step_off"]) <= TIME_BOUND) for row in others),
        "prefill_within": sum(bool(abs(row["prefill_off"]) <= TIME_BOUND) for row in others),
    }


def print_table(table: list[dict[str, Any]]) -> None:
    """As Markdown."""
    print(
        "| | load | engine | plan | used, MiB | engine off | plan off | step, ms | off | prefill, s | off | hits |"
    )
    print("|---" * 12 + "|")
    for row in table:
        mark = f"{row['number']}{'*' if row['fitted'] else ''}"
        if "used_bytes" not in row:
            print(f"| {mark} | {row['load']} | failed: {row['error']} |" + " |" * 9)
            continue
        sizes = " | ".join(f"{row[name + '_bytes'] / MIB:.0f}" for name in ("engine", "plan", "used"))
        hits = "" if row["hit_rate"] is None else f"{row['hit_rate']:.3f}"
        off = {name: f"{row[name + '_off']:+.1%}" for name in ("bytes", "plan", "step", "prefill")}
        print(
            f"| {mark} | {row['load']} | {sizes} | {off['bytes']} | {off['plan']} | {1e3 * row['step_s']:.3f} "
            f"| {off['step']} | {row['prefill_s']:.3f} | {off['prefill']} | {hits} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="numbers of loads, by commas")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = [int(part) - 1 for part in args.only.split(",")] if args.only else list(range(len(LOADS)))
    if args.child is not None:
        child(args.child, chosen[0])
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        likes = list({LOADS[index].like for index in chosen})
        with ProcessPoolExecutor(len(likes)) as pool:
            folders = dict(zip(likes, pool.map(make, itertools.repeat(Path(name)), likes), strict=True))
        print(f"models made in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        machine, rates = measured_machine()
        facts = {index: read_model(folders[LOADS[index].like]) for index in chosen}
        found = run_loads(folders, chosen)
        table, fitted = rows(machine, facts, found)
    told = verdicts(table)
    if args.report is not None:
        args.report.write_text(json.dumps({"rates": rates, "fitted": fitted, "verdicts": told, "rows": table}, indent=1,
                                          default=str))  # fmt: skip
    print(f"rates, GB/s: {', '.join(f'{name} {rate / 1e9:.1f}' for name, rate in rates.items())}")
    print(f"fitted: {', '.join(f'{name} {value:.3g}' for name, value in fitted.items())}")
    print_table(table)
    print(f"{told}, {time.perf_counter() - began:.0f} s in all")
    missed = told["not_fitted"] - min(told["step_within"], told["prefill_within"])
    if told["engine_bytes_within"] < told["loads"] or missed > TIME_MISSES:
        sys.exit(1)


if __name__ == "__main__":
    main()
