"""The plan: placement under caps, its order under more memory, alternatives, and the command. With `--write` the tables
of docs/plan.md are brought up to date."""

import json
import os
import random
import re
import resource
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from test_staging import late  # noqa: F401

from packhorse.cli import main as cli
from packhorse.core.config import EngineConfig
from packhorse.core.cost import CPU_UNPACK_BYTES, UNPACK_BYTES
from packhorse.core.errors import CorruptFileError, DoesNotFitError, UsageError
from packhorse.core.types import PAGE_LEN
from packhorse.core.units import GIB, MIB, ceil_div, parse_bytes
from packhorse.engine.experts import KEPT_FOR_TIERS
from packhorse.engine.graphs import BUCKETS
from packhorse.facts import steps
from packhorse.facts.known import known_model, known_names
from packhorse.facts.machine import (
    DISPLAY_BYTES,
    SYSTEM_BYTES,
    calibration,
    profile_names,
    read_profile,
    this_machine,
    with_caps,
)
from packhorse.facts.packed import packed_matrices
from packhorse.facts.recipes import as_stored, recipe
from packhorse.kernels.delta.cuda import HEAD_DIMS
from packhorse.kernels.experts.cuda import MAX_EXPERTS, MAX_TOP_K
from packhorse.kernels.norm.cuda import MAX_HIDDEN
from packhorse.layers.step import misfit
from packhorse.plan import account
from packhorse.plan.place import NOT_LENT, SWEEPS, Footprint, Job, place
from packhorse.plan.predict import EXPECTED, HIGH, LOW, Times, predict, tail_s
from packhorse.plan.report import table, to_document
from packhorse.plan.size import size_engine
from packhorse.plan.solve import Wishes, solve
from packhorse.store.kv import KVStore
from packhorse.store.staging import SLOTS_DOWN, SLOTS_UP
from packhorse.store.tier import StoreGeometry

CODECS = ("fp16", "fp8", "k5v4", "k4v4")
MODELS = ("qwen3.6-35b-a3b", "qwen3.6-27b", "qwen3.5-4b", "qwen3-next-80b-a3b", "qwen3-30b-a3b", "qwen3-32b")
FOOTPRINTS = {
    (name, own, cards): Footprint(known_model(name), recipe(own), cards)
    for name in MODELS
    for own in ("bf16", "int4", "balanced", "2.5bit")
    for cards in (0, 1, 2)
}
NO_CAPS = {"vram": None, "ram": None, "disk": None}


def draw(rng: random.Random):
    """A machine, a footprint and a job, often too large for it."""
    machine = read_profile(rng.choice(profile_names()))
    machine = with_caps(machine, vram=int(rng.uniform(0.5, 100) * GIB) if rng.random() < 0.7 else None, ram=None,
                        disk=None)  # fmt: skip
    machine = replace(
        machine,
        card=replace(machine.card, count=rng.choice((1, 1, 2))),
        ram_bytes=int(2 ** rng.uniform(-1, 8) * GIB),
        disk_bytes=int(2 ** rng.uniform(0, 10) * GIB),
        link_rate=10 ** rng.uniform(8, 11),
        memory_rate=10 ** rng.uniform(9, 11.3),
    )
    if rng.random() < 0.1:
        machine = replace(machine, card=None)
    key = (rng.choice(MODELS), rng.choice(("bf16", "int4", "balanced", "2.5bit")), machine.num_cards)
    job = Job(
        context=int(2 ** rng.uniform(4, 20)),
        sequences=rng.choice((1, 1, 1, 2, 4, 8)),
        kv=rng.choice(CODECS),
        draft=rng.choice((0, 0, 0, 3)),
    )
    job = replace(job, host_kv=rng.choice((0, 0, job.context // 2)))
    return machine, FOOTPRINTS[key], job


def slower(before: Times, after: Times) -> list[str]:
    """Figures that got worse. Loading is none of them: to fill more memory takes longer."""
    worse = []
    for name in (field.name for field in fields(Times) if field.name != "load_s"):
        old, new = getattr(before, name), getattr(after, name)
        if old is None:
            continue
        higher_is_better = name.startswith("decode")
        if new is None or (new < old * (1 - 1e-9) if higher_is_better else new > old * (1 + 1e-9)):
            worse.append(f"{name}: {old} -> {new}")
    return worse


def test_more_memory_is_never_slower():
    rng, compared = random.Random(1), 0
    for _ in range(2000):
        machine, footprint, job = draw(rng)
        before = place(footprint, machine, job)
        grown = machine
        if machine.card is not None and rng.random() < 0.7:
            more = int(rng.choice((1, 17 * MIB, GIB, 8 * GIB)) * rng.uniform(1, 2))
            grown = replace(
                machine, card=replace(machine.card, usable_bytes=machine.card.usable_bytes + more)
            )
        if grown is machine or rng.random() < 0.5:
            grown = replace(grown, ram_bytes=grown.ram_bytes + int(rng.uniform(0, 32) * GIB))
        if rng.random() < 0.3:
            grown = replace(grown, disk_bytes=grown.disk_bytes + int(rng.uniform(0, 100) * GIB))
        if not before.fits:
            continue
        assert place(footprint, grown, job).fits, (machine, grown, job)
        # Where more memory lets chunks be longer, prompts gain by it and experts lose some of it.
        after = place(footprint, grown, replace(job, chunk_len=before.chunk_len))
        assert after.fits, (machine, grown, job)
        compared += 1
        for band in (LOW, EXPECTED, HIGH):
            then, now = predict(footprint, machine, before, band), predict(footprint, grown, after, band)
            worse = slower(then, now)
            if after.sweep_len > before.sweep_len and now.cold_first_token_s < then.cold_first_token_s:
                # Fewer, longer sweeps take space from experts, which a follow-up then streams.
                worse = [w for w in worse if "cold" in w or now.tail_64_s > 1.01 * then.tail_64_s]
            assert not worse, (footprint.facts.name, footprint.recipe.name, machine, grown, job, worse)
    assert compared > 400


@pytest.mark.parametrize(("profile", "context"), [("h200", 8192), ("rtx-4090", 32_768)])
def test_more_memory_with_the_chunks_that_the_engine_takes(profile, context):
    """As the documentation has it: cold prompts alone are slower, where all experts come to lie on the card and chunks
    are short."""
    machine, footprint = read_profile(profile), FOOTPRINTS["qwen3.6-35b-a3b", "int4", 1]
    job, before, falls = Job(context, 1, "fp8"), None, 0
    for cap in range(6 * GIB, 24 * GIB, 64 * MIB):
        grown = replace(machine, card=replace(machine.card, usable_bytes=cap))
        found = place(footprint, grown, job)
        if not found.fits:
            assert before is None
            continue
        times = predict(footprint, grown, found)
        if before is not None:
            worse = slower(before[1], times)
            assert all(text.startswith("cold") for text in worse), worse
            if worse:
                falls += 1
                assert before[0].kept == 0 and found.kept == found.num_units
                assert found.chunk_len < before[0].chunk_len
                assert times.decode_tok_s_end > before[1].decode_tok_s_end
        before = found, times
    assert falls == 1


def test_a_fitting_plan_stays_under_every_cap():
    rng, kinds = random.Random(2), set()
    for _ in range(2500):
        machine, footprint, job = draw(rng)
        found = place(footprint, machine, job)
        over = {name: tier.total_bytes - tier.cap_bytes for name, tier in found.tiers.items()}
        assert all(size > 0 for tier in found.tiers.values() for size in tier.items.values())
        if found.fits:
            assert max(over.values()) <= 0
            assert 0 <= found.kept <= found.on_device <= found.num_units
        else:
            assert found.shortfall == {name: size for name, size in over.items() if size > 0}
        kinds.add((found.fits, bool(found.num_units), found.on_device == found.num_units))
    assert len(kinds) >= 5


def least_device_bytes(footprint: Footprint, machine, job: Job, index: int) -> int:
    """The least that a card's part could take, written out anew: all of it resident, or nothing of what moves but
    two buffers of a layer, with the shortest sweep."""
    part, facts, dtype = footprint.parts[index], footprint.facts, footprint.recipe.dtype
    kinds = dict(footprint.part_classes[index])
    moving = kinds.pop("experts" if facts.moe else "mlp", 0)
    snapshots = 16 if facts.moe and machine.num_cards == 1 and not job.draft and not job.host_kv else 4
    need = sum(kinds.values()) + (2 * job.sequences + snapshots) * account.snapshot_bytes(part, dtype)
    need += account.runtime_bytes() + account.graph_bytes(job.sequences)
    need += job.sequences * account.kv_bytes(part, job.kv, job.context - job.host_kv, 64)
    if index == machine.num_cards - 1:
        need += footprint.classes["embeddings" if facts.tied else "lm_head"]
        need += 12 * job.sequences * (1 + job.draft) * facts.vocab_size
        if job.draft:
            need += footprint.draft_bytes + job.draft * job.sequences * footprint.snapshot_bytes
            one_layer = account.kv_page_bytes(facts, job.kv, 64)
            need += job.sequences * ceil_div(job.context, 64) * one_layer
    scratch = account.chunk_bytes(facts, 1024 + job.sequences)
    scratch += account.delta_transient_bytes(facts, 1024) + (
        UNPACK_BYTES if footprint.recipe.is_packed else 0
    )
    if job.kv != dtype:
        scratch += account.kv_decode_bytes(facts, account.SEGMENT_LEN, job.kv)
    need += account.split_bytes(facts, job.sequences * (1 + job.draft)) + scratch
    sized = machine.num_cards == 1 and not job.draft and not job.host_kv
    residuals, streamed = 4 * facts.hidden_size * SWEEPS[0], 2 * moving // part.num_layers
    if not sized:
        return need + residuals + min(moving, streamed)
    if facts.moe is None:
        return need + min(moving, residuals + streamed)
    # Experts that are not packed are not streamed; those that are need slots for two steps of each layer.
    fewest = 4 * sum(facts.moe_layers) * footprint.unit_bytes
    return need + (min(moving, streamed + fewest) if footprint.recipe.is_packed else moving)


def test_what_is_refused_cannot_fit():
    rng, refused = random.Random(3), 0
    for _ in range(2500):
        machine, footprint, job = draw(rng)
        found = place(footprint, machine, job)
        for index in range(machine.num_cards):
            short = found.shortfall.get(f"device{index}", 0)
            least = least_device_bytes(footprint, machine, job, index)
            cap = machine.card.usable_bytes
            # Frames are whole, also those of a layer: as much as that may be lost of what the parts sum to.
            slack = 4 * max(account.FRAME_BYTES, footprint.unit_bytes)
            if short > slack:
                assert least > cap, (footprint.facts.name, footprint.recipe.name, machine, job, short, least)
                refused += 1
            if least > cap:
                assert short
        if machine.card is None and "host" in found.shortfall:
            facts, dtype = footprint.facts, footprint.recipe.dtype
            tokens = job.sequences * (job.context + 64)
            least = sum(footprint.classes.values()) + tokens * account.kv_token_bytes(facts, job.kv)
            least += (2 * job.sequences + 16) * account.snapshot_bytes(facts, dtype) + account.PROCESS_BYTES
            work = (
                account.activation_bytes(facts, 1024 + job.sequences) + 12 * job.sequences * facts.vocab_size
            )
            work += account.kv_decode_bytes(facts, account.SEGMENT_LEN) if job.kv != dtype else 0
            work += CPU_UNPACK_BYTES if packed_matrices(footprint.stored) else 0
            least += work + work // 2
            assert least > machine.ram_bytes
        if "disk" in found.shortfall:
            assert sum(footprint.classes.values()) + footprint.draft_bytes > machine.disk_bytes
    assert refused > 300


def test_every_alternative_fits_when_it_is_asked_for(monkeypatch):
    """On profiles, whose hosts are assumed, on real machines with and without a card, and by wishes beyond them."""
    rng, kinds, cases, offered = random.Random(4), set(), [], 0
    for _ in range(110):
        machine = read_profile(rng.choice(profile_names()))
        if rng.random() < 0.6:
            ram, disk = (int(2 ** rng.uniform(2, 7) * GIB) for _ in range(2))
            bare = {"card": None} if rng.random() < 0.6 else {}
            found = {"free": rng.random() < 0.5, "native_bf16": True, "ram_bytes": ram, "disk_bytes": disk}
            machine = replace(machine, assumed=False, **found, **bare)
        facts = known_model(rng.choice(known_names()))
        wishes = Wishes(
            context=int(2 ** rng.uniform(12, 20)) if rng.random() < 0.8 else None,
            sequences=rng.choice((1, 1, 2, 8)),
            kv=rng.choice((None, "auto", *CODECS)),
            recipe=rng.choice((None, "int4", "int8", "bf16")),
            vram=None if machine.card is None else rng.choice((None, None, int(rng.uniform(1, 24) * GIB))),
            ram=rng.choice((None, None, int(rng.uniform(2, 64) * GIB), 300 * GIB)),
            disk=rng.choice((None, None, int(rng.uniform(1, 64) * GIB), 9000 * GIB)),
            prefer=rng.choice(("speed", "context", "quality")),
        )
        cases.append((facts, machine, wishes, solve(facts, machine, wishes)))
    monkeypatch.setattr("packhorse.plan.solve._Offers", lambda *args: ())
    # Where the context is asked for, what else might be reached says nothing of whether it fits.
    monkeypatch.setattr("packhorse.plan.solve._last", lambda holds, most: most)
    for facts, machine, wishes, plan in cases:
        assert plan.fits == (plan.placement.job.context <= plan.limit)
        for offer in plan.alternatives:
            change = dict(offer.change)
            asked = known_model(change.pop("model")) if "model" in change else facts
            vram = change.pop("vram", wishes.vram)
            full = {
                "vram": None if vram == "auto" else vram,
                "context": plan.placement.job.context,
                "kv": plan.placement.job.kv,
                "recipe": plan.recipe.name,
            }
            again = solve(asked, machine, replace(wishes, **(full | change)))
            assert again.fits, (offer, wishes, machine)
            assert again.times[EXPECTED] == offer.times, (offer, wishes)
            assert again.executable == offer.built
            offered += 1
            kinds.add((machine.card is None, machine.assumed, *sorted(offer.change)))
    assert offered > 200 and len(kinds) > 30
    assert any(len(kind) > 4 for kind in kinds) and any(kind[0] and "ram" in kind for kind in kinds)


LAPTOP = replace(
    read_profile("t4"), name="laptop", card=None, assumed=False, free=True, native_bf16=True, cores=4,
    ram_bytes=21 * GIB, disk_bytes=50 * GIB,
)  # fmt: skip


def changes(name: str, machine, **wishes):
    return [dict(offer.change) for offer in solve(known_model(name), machine, Wishes(**wishes)).alternatives]


def test_a_refused_wish_is_not_offered_again_and_has_a_way_out():
    """Where no single change is enough, several are offered together."""
    most = with_caps(LAPTOP, **NO_CAPS).ram_bytes
    moe, dense = "qwen3.6-35b-a3b", "qwen3.6-27b"
    found = changes(moe, LAPTOP, recipe="int4", context=250_000, ram=24 * GIB)
    assert any("context" in change for change in found) and not any("ram" in change for change in found)
    [more] = [change["ram"] for change in changes(moe, LAPTOP, recipe="int4", context=8192, ram=8 * GIB)
              if set(change) == {"ram"}]  # fmt: skip
    assert 19 * GIB < more < 20 * GIB and more <= most
    tight = replace(LAPTOP, ram_bytes=12 * GIB)
    assert any("model" in change for change in changes(moe, tight, context=8192))
    assert {"model": moe, "recipe": "int4"} in changes(dense, LAPTOP)
    assert {"disk": 17 * GIB} in changes(moe, read_profile("rtx-2080ti-11g"), disk=5 * GIB)
    found = changes(
        dense, read_profile("rtx-3060-12g"), context=245_760, sequences=4, recipe="int8", kv="fp16"
    )
    assert any("model" not in change and len(change) > 1 for change in found)
    assert any(change.get("model") == moe for change in found)
    short = changes(dense, LAPTOP, context=262_144, sequences=8, disk=3 * GIB, ram=9 * GIB)
    assert any({"disk", "ram", "context"} <= set(change) for change in short)


def test_what_the_engine_cannot_run_comes_with_what_it_runs():
    """Also where it is fast enough; without a way that it runs there is no offer."""
    facts, machine = known_model("qwen3-32b"), read_profile("rtx-3090")
    plan = solve(facts, machine, Wishes(sequences=4, context=16_384))
    assert plan.fits and not plan.crawls and plan.unbuilt == ("mlp in int4 outside the card",)
    found = [dict(offer.change) for offer in plan.alternatives]
    assert {"sequences": 2} in found and {"kv": "k5v4"} in found and all(o.built for o in plan.alternatives)
    for change in ({"sequences": 2}, {"kv": "k5v4"}):
        again = replace(Wishes(sequences=4, context=plan.placement.job.context), **change)
        assert solve(facts, machine, again).executable
    two = solve(known_model("qwen3.8-27b"), read_profile("rtx-3090-x2"), Wishes(context=131_072))
    assert two.unbuilt == ("2 cards",) and not two.crawls and two.alternatives == ()


def test_the_default_context_is_one_that_the_engine_runs():
    """Where there is one: longer ones are modelled, and come with it, with a lower codec and with other ways."""
    facts, machine = known_model("qwen3.6-27b"), read_profile("rtx-4060ti-16g")
    for prefer in ("speed", "context"):
        plan = solve(facts, machine, Wishes(prefer=prefer))
        assert plan.executable and plan.placement.job.context == plan.runs < plan.comfortable < plan.limit
        longer = solve(facts, machine, Wishes(prefer=prefer, context=plan.runs + PAGE_LEN))
        assert not longer.executable and longer.runs == plan.runs
    runs = solve(facts, machine, Wishes()).runs
    for context in (28_672, 32_768, 40_960, 45_056, 131_072):
        plan = solve(facts, machine, Wishes(context=context))
        assert plan.fits and not plan.executable
        built = [offer.built for offer in plan.alternatives]
        assert built == sorted(built, reverse=True)
        ways = [dict(offer.change) for offer in plan.alternatives if offer.built]
        [lower] = [way for way in ways if "kv" in way]
        assert ways[0] == {"context": runs} and runs < lower.get("context", context) <= context
        assert {"model": "qwen3.6-35b-a3b"} in ways
    # Where no context runs, it is as long as fits well.
    none = solve(facts, read_profile("rtx-3060-12g"), Wishes())
    assert none.runs == 0 and none.fits and none.placement.job.context == none.comfortable
    assert none.alternatives[0].built
    moe = known_model("qwen3.6-35b-a3b")
    short = solve(moe, read_profile("rtx-3060-12g"), Wishes(context=32_768, ram=12 * GIB))
    assert short.alternatives[0].change == {"ram": 24 * GIB} and short.alternatives[0].built
    # Nothing alone: the whole card and a shorter context.
    both = solve(facts, machine, Wishes(context=262_144, vram=14 * GIB))
    assert {"context": runs, "vram": "auto"} in [
        dict(offer.change) for offer in both.alternatives if offer.built
    ]


def test_too_little_of_a_card_comes_with_the_least_that_is_enough():
    facts, machine = known_model("qwen3.6-35b-a3b"), read_profile("rtx-3060-12g")
    [least] = [
        change["vram"] for change in changes("qwen3.6-35b-a3b", machine, vram=GIB) if set(change) == {"vram"}
    ]
    assert solve(facts, machine, Wishes(vram=least)).executable
    assert not solve(facts, machine, Wishes(vram=least - GIB // 50, context=262_144)).fits


def test_the_first_line_says_whether_the_engine_runs_it(capsys):
    card = ("qwen3.6-27b", "--profile", "rtx-4060ti-16g", "--context")
    for context, verdict, label in (
        ("8192", ": fits", None),
        ("40960", ": the engine cannot run it", "runs instead: --context "),
        ("2000000", "the model reaches 1,048,576 tokens at most", "fits instead: "),
    ):
        _, out, _ = run(capsys, *card, context)
        first, *rest = out.splitlines()
        assert first.startswith("qwen3.6-27b on ") and first.endswith(verdict)
        offers = [line for line in rest if "instead: " in line or line.startswith("faster: ")]
        assert offers[0].startswith(label) if label else not offers
        assert "fits" not in rest
    _, out, _ = run(capsys, *card, "131072")
    assert "faster: --recipe 3bit" in out and "; the engine runs " in out and "fits instead" not in out
    document = json.loads(run(capsys, *card, "40960", "--json")[1])
    assert document["fits"] and not document["executable"] and 0 < document["context"]["runs"] < 40_960


@pytest.mark.parametrize(
    ("name", "kv"), [("qwen3.6-35b-a3b", "fp8"), ("qwen3-32b", "fp16"), ("qwen3.5-4b", "k5v4")]
)
def test_staging_is_planned_as_the_store_takes_it(name, kv, late):  # noqa: F811
    """Pages of 0.6 to 16 MiB over all layers, on what passes for a card."""
    facts = known_model(name)
    geometry = StoreGeometry.of(facts, torch.float16, PAGE_LEN, kv)
    store = KVStore(geometry, num_pages=2, sequences=1, snapshots=1, snapshot_len=8192)
    store.add_tiers(ram_bytes=MIB, disk=None, model=0)
    staging = store.lower._staging
    assert (SLOTS_UP + SLOTS_DOWN) * staging.size == account.staging_bytes(facts, kv, PAGE_LEN)
    plan = solve(facts, read_profile("a100-80g"), Wishes(context=8192, kv=kv))
    assert plan.placement.tiers["host"].items["staging"] == account.staging_bytes(facts, kv, PAGE_LEN)


def test_without_a_card_weights_are_packed_where_unpacked_ones_find_no_room():
    facts = known_model("qwen3.6-35b-a3b")
    plans = {
        prefer: solve(facts, LAPTOP, Wishes(prefer=prefer)) for prefer in ("speed", "context", "quality")
    }
    named = {prefer: (plan.recipe.name, plan.placement.job.kv) for prefer, plan in plans.items()}
    assert named == {"speed": ("int4", "bf16"), "context": ("int4", "k4v4"), "quality": ("balanced", "bf16")}
    assert all(plan.fits and plan.executable for plan in plans.values())
    small = known_model("qwen3.5-0.8b")
    assert solve(small, LAPTOP, Wishes()).recipe.name == "bf16"
    assert solve(small, LAPTOP, Wishes(prefer="context")).recipe.name == "int4"


def test_kv_in_host_memory_costs_the_link():
    """Half of 27B's KV at 131,072 tokens in 16 bits leaves the card and comes back for every token."""
    facts, machine = known_model("qwen3.6-27b"), read_profile("rtx-3060-12g")
    refused = solve(facts, machine, Wishes(context=131_072, kv="fp16"))
    [offer] = [offer for offer in refused.alternatives if "host_kv" in offer.change]
    found = solve(facts, machine, Wishes(context=131_072, kv="fp16", host_kv=65_536))
    items = {name: tier.items for name, tier in found.placement.tiers.items()}
    assert items["device0"]["kv"] == items["host"]["kv"] == 65_536 * 65_536
    assert found.fits and "active KV in host memory" in found.unbuilt and offer.times.decode_tok_s_end > 0
    cap = solve(facts, read_profile("rtx-3090"), Wishes(context=131_072, host_kv=65_536, recipe="2.5bit"))
    free = solve(facts, read_profile("rtx-3090"), Wishes(context=131_072, recipe="2.5bit"))
    slower_by = 1 / cap.times[EXPECTED].decode_tok_s_end - 1 / free.times[EXPECTED].decode_tok_s_end
    part = {name: entry["values"][EXPECTED] for name, entry in calibration()["fractions"].items()}
    longer = 65_536 * 32_768 * (1 / (24e9 * part["link"]) - 1 / (936e9 * part["vram_kv"]))
    assert slower_by == pytest.approx(longer, rel=1e-6)
    assert cap.times[EXPECTED].decode_tok_s_start == free.times[EXPECTED].decode_tok_s_start


def test_experts_that_host_memory_has_no_room_for_are_not_executable():
    """The engine streams them from host memory, which holds all of them; it does not read them from a disk."""
    facts, machine = known_model("qwen3.6-35b-a3b"), read_profile("rtx-2080ti-11g")
    for ram, on_disk in ((64 * GIB, False), (12 * GIB, True)):
        plan = solve(facts, machine, Wishes(context=32_768, kv="fp8", ram=ram))
        assert plan.fits and plan.placement.kept < plan.placement.num_units
        assert ("experts on disk" in plan.unbuilt) == on_disk == (plan.placement.in_host < 10_240)


def test_bands_are_in_order():
    rng = random.Random(5)
    for _ in range(500):
        machine, footprint, job = draw(rng)
        found = place(footprint, machine, job)
        if found.fits:
            low, expected, high = (predict(footprint, machine, found, band) for band in (LOW, EXPECTED, HIGH))
            assert not slower(low, expected) and not slower(expected, high)


def test_the_four_machines():
    """DESIGN's own arithmetic: what fits, and roofs that no plan may promise to pass."""
    a = solve(known_model("qwen3.6-35b-a3b"), read_profile("rtx-2080ti-11g"), Wishes(context=245_760))
    assert a.fits and a.placement.tiers["device0"].cap_bytes == parse_bytes("10.4GiB")
    assert a.executable
    assert 0.25 < a.placement.on_device / a.placement.num_units < 0.5 and a.placement.in_host == 10_240
    assert 4 <= a.placement.num_sweeps <= 8
    assert all(times.cold_first_token_s > 57 for times in a.times)
    assert 25 < a.times[HIGH].decode_tok_s_end < 37 and a.times[EXPECTED].decode_tok_s_start > 20
    b = solve(
        known_model("qwen3.6-35b-a3b"), read_profile("rtx-2080ti-22g"), Wishes(context=32_768, sequences=2)
    )
    assert b.executable and b.placement.kept == b.placement.num_units
    assert b.times[EXPECTED].decode_tok_s_start > 100
    assert b.times[EXPECTED].decode_tok_s_total > b.times[EXPECTED].decode_tok_s_end
    c = solve(known_model("qwen3.6-27b"), read_profile("rtx-3060-12g"), Wishes(context=131_072))
    assert c.placement.on_device < c.placement.num_units  # four bits do not fit on the card
    assert c.times[EXPECTED].decode_tok_s_end < 5
    assert any(offer.change == {"model": "qwen3.6-35b-a3b"} for offer in c.alternatives)
    small = solve(
        known_model("qwen3.6-27b"), read_profile("rtx-3060-12g"),
        Wishes(context=131_072, recipe="2.5bit", kv="k4v4"),
    )  # fmt: skip
    assert small.fits and small.times[HIGH].decode_tok_s_end < 34
    d = solve(known_model("qwen3.8-27b"), read_profile("rtx-3090-x2"), Wishes(context=524_288))
    assert d.fits and set(d.placement.tiers) == {"device0", "device1", "host", "disk"}
    assert any("YaRN" in text for text in d.warnings) and "2 cards" in d.unbuilt
    native = solve(known_model("qwen3.8-27b"), read_profile("rtx-3090-x2"), Wishes(context=262_144))
    assert native.times[HIGH].decode_tok_s_end < 42


def test_one_card_is_planned_as_the_engine_sizes_it(monkeypatch):
    """Byte for byte, over models, caps, contexts, codecs and sequences; by the plan's settings, and left alone."""
    monkeypatch.setattr("packhorse.plan.solve._Offers", lambda *args: ())
    rng, kinds = random.Random(6), set()
    for _ in range(140):
        name, own = (
            rng.choice(MODELS),
            rng.choice(("int4", "int4", "balanced", "int8", "fp8", "bf16", "fp16")),
        )
        machine = read_profile(rng.choice([one for one in profile_names() if one != "rtx-3090-x2"]))
        wishes = Wishes(
            context=int(2 ** rng.uniform(8, 18)), sequences=rng.choice((1, 1, 2, 4)), kv=rng.choice(CODECS), recipe=own,
            vram=rng.choice((None, int(rng.uniform(8, 80) * GIB), int(rng.uniform(14, 22) * GIB))), ram=200 * GIB,
        )  # fmt: skip
        plan = solve(known_model(name), machine, wishes)
        settings = to_document(plan, name)["engine"]
        if not plan.executable:
            assert settings is None
            continue
        files = as_stored(plan.facts, plan.recipe)
        config = EngineConfig(**settings)
        cap, flops = plan.machine.card.usable_bytes, plan.machine.card.flops
        sizes = size_engine(files, config, config.dtype, cap, plan.machine.ram_bytes, flops=flops)
        alone = replace(config, chunk_len=None, sweep_len=None, ram=0)
        assert size_engine(files, alone, config.dtype, cap, flops=flops) == sizes
        device, host = (plan.placement.tiers[tier] for tier in ("device0", "host"))
        assert device.total_bytes == sizes.device_bytes <= cap == config.vram
        assert device.items["kv"] == sizes.kv_bytes and device.items.get("states", 0) == sizes.state_bytes
        assert host.items["embeddings" if not plan.facts.tied else "process"] + sizes.pinned_bytes == (
            sizes.host_bytes if not plan.facts.tied else host.items["process"]
        )
        assert host.items.get("experts", 0) == sizes.pinned_bytes
        experts = to_document(plan, name)["experts"]
        streamed = sizes.expert_slots is not None
        assert experts["slots"] == (sizes.expert_slots if streamed else experts["total"])
        assert plan.placement.kept == (0 if streamed else plan.placement.num_units)
        kinds.add((name, streamed, bool(sizes.sweep_len), config.snapshots))
    assert (
        len(kinds) > 12
        and {kind[1] for kind in kinds} == {True, False}
        and {kind[3] for kind in kinds} == {4, 16}
    )


def test_longer_chunks_refuse_nothing_and_send_no_experts_away():
    """Cap after cap, a model that fits stays whole on the card, though its chunks become longer."""
    facts = as_stored(known_model("qwen3.6-35b-a3b"), recipe("int4"))
    config = EngineConfig(device="cuda", dtype="fp16", kv="fp8", context=16_384, kv_tokens=65_536)
    chunks, streamed, fitted = set(), [], False
    for cap in range(4 * GIB, 30 * GIB, 64 * MIB):
        try:
            sizes = size_engine(facts, config, "fp16", cap, flops=142e12)
        except DoesNotFitError:
            assert not fitted
            continue
        fitted = True
        chunks.add(sizes.chunk_len)
        streamed.append(sizes.expert_slots is not None)
    assert streamed == sorted(streamed, reverse=True) and {True, False} == set(streamed)
    assert {1024, 4096, 8192} <= chunks


def test_what_the_engine_does_not_do_is_named():
    moe, dense = known_model("qwen3.6-35b-a3b"), known_model("qwen3.6-27b")
    old, new = read_profile("rtx-2080ti-22g"), read_profile("rtx-4090")
    card = replace(old.card, arch=70)
    cases = [
        (moe, replace(old, card=card), {}, "compute capability 7.0"),
        (dense, replace(old, ram_bytes=200 * GIB), {"recipe": "bf16", "vram": 200 * GIB}, "bf16 on compute"),
        (moe, new, {"draft": 2}, "draft heads"),
        (moe, new, {"host_kv": 1024}, "active KV in host memory"),
        (moe, new, {"recipe": "2.5bit"}, "no format"),
        (moe, new, {"context": 300_000, "kv": "k4v4"}, "beyond the model's window"),
        (
            dense,
            read_profile("rtx-3060-12g"),
            {"kv": "k4v4", "context": 65_536},
            "mlp in int4 outside the card",
        ),
        (
            replace(moe, moe=replace(moe.moe, top_k=12)),
            read_profile("rtx-2080ti-11g"),
            {},
            "it routes 12 of 256",
        ),
        (moe, read_profile("rtx-3090-x2"), {}, "2 cards"),
        (moe, new, {"recipe": "bf16", "host_kv": 64}, "experts in bf16 outside the card"),
        (dense, read_profile("h200"), {"sequences": 17}, "17 requests (16 at most)"),
    ]
    for facts, machine, wishes, why in cases:
        if "bf16 on" in why:
            machine = replace(machine, card=replace(machine.card, usable_bytes=100 * GIB))
        plan = solve(facts, machine, Wishes(**{"context": 8192, **wishes}))
        assert plan.fits and not plan.executable and why in "; ".join(plan.unbuilt), (why, plan.unbuilt)
    assert solve(moe, old, Wishes(context=8192)).executable


def test_step_kernels_are_planned_for_as_they_are():
    """What facts say of them is what the kernels' own modules say, and each reason is found."""
    assert (steps.MAX_HIDDEN, steps.MAX_EXPERTS, steps.MAX_TOP_K) == (MAX_HIDDEN, MAX_EXPERTS, MAX_TOP_K)
    assert steps.DELTA_HEAD_DIMS == HEAD_DIMS and BUCKETS[-1] == steps.MAX_SEQUENCES
    assert NOT_LENT == KEPT_FOR_TIERS
    facts = known_model("qwen3.6-35b-a3b")
    assert steps.step_misfit(facts, "bf16") is steps.step_misfit(facts, "fp16") is None
    wrong = {
        "computes in fp32": (facts, "fp32"),
        "hidden size is 8256": (replace(facts, hidden_size=8256), "fp16"),
        "have 48 and 128": (replace(facts, delta=replace(facts.delta, k_head_dim=48)), "fp16"),
        "routes 11 of 256": (replace(facts, moe=replace(facts.moe, top_k=11)), "fp16"),
        "no multiples of 64": (replace(facts, moe=replace(facts.moe, expert_dim=520)), "fp16"),
    }
    for text, (other, dtype) in wrong.items():
        assert text in steps.step_misfit(other, dtype)
        assert misfit(other, torch.float32 if dtype == "fp32" else torch.float16) == steps.step_misfit(
            other, dtype
        )


def test_a_machine_without_a_card_is_planned_as_the_engine_sizes_it():
    for name in ("qwen3.5-0.8b", "qwen3-30b-a3b", "qwen2.5-32b"):
        facts = known_model(name)
        for dtype, kv, sequences in (("bf16", "bf16", 1), ("fp32", "fp32", 3), ("fp16", "k4v4", 2)):
            stored = "auto" if kv == dtype else kv
            config = EngineConfig(context=8192, sequences=sequences, dtype=dtype, kv=stored)
            sizes = size_engine(facts, config, dtype, 2000 * GIB)
            host = place(Footprint(facts, recipe(dtype), 0), with_caps(this_machine(Path.home()), **NO_CAPS),
                         Job(8192, sequences, kv)).tiers["host"].items  # fmt: skip
            others = ("process", "kv", "states", "workspace", "logits_and_sampler")
            assert sum(size for kind, size in host.items() if kind not in others) == sizes.weight_bytes
            assert host["kv"] == sizes.kv_bytes and host.get("states", 0) == sizes.state_bytes
            assert host["workspace"] + host["logits_and_sampler"] == sizes.workspace_bytes
    machine = replace(read_profile("t4"), card=None, ram_bytes=200 * GIB, native_bf16=True, assumed=False)
    for name in ("qwen3-30b-a3b", "qwen3.5-0.8b"):
        plan = solve(known_model(name), machine, Wishes(context=4096, recipe="int4"))
        config = EngineConfig(**to_document(plan, name)["engine"])
        sizes = size_engine(as_stored(plan.facts, plan.recipe), config, config.dtype, 200 * GIB)
        taken = plan.placement.tiers["host"].total_bytes - account.PROCESS_BYTES
        assert plan.executable and sizes.packed and taken == sizes.total_bytes


def test_profiles():
    expected = """
    rtx-2080ti-11g rtx-2080ti-22g rtx-3060-12g rtx-3080-10g rtx-3080-12g rtx-3090 rtx-3090-x2 rtx-4060-8g
    rtx-4060ti-8g rtx-4060ti-16g rtx-4070 rtx-4080 rtx-4090 rtx-5060ti-16g rtx-5070ti rtx-5080 rtx-5090 t4 a10 a40 l4
    a100-40g a100-80g h100 h200"""
    assert set(profile_names()) == set(expected.split())
    for name in profile_names():
        machine = read_profile(name)
        assert machine.sources and machine.measured == (name == "h200") and machine.name == name
        assert all(
            entry["values"] == sorted(entry["values"]) for entry in calibration()["fractions"].values()
        )
    assert read_profile("RTX-3090-x2").num_cards == 2
    assert read_profile("t4", {"link": "riser-pcie3-x1", "drive": None}).link_rate == 0.8e9


def test_parts_of_machines_have_sources():
    parts = json.loads((Path(cli.__file__).parents[1] / "facts/parts.json").read_text())
    lanes = {f"pcie{generation}-x{width}" for generation in (2, 3, 4, 5) for width in (4, 8, 16)}
    wanted = {
        "links": lanes | {"pcie3-x4-chipset", "pcie4-x4-chipset", "riser-pcie3-x1"},
        "memories": {"ddr4-2ch", "ddr4-4ch", "ddr5-2ch", "ddr5-4ch"},
        "drives": {"sata-ssd", "nvme3", "nvme4", "nvme5"},
    }
    for kind, names in wanted.items():
        assert names <= set(parts[kind])
        assert all(part["gb_s"] > 0 and part["source"] for part in parts[kind].values())
    for entry in calibration().values():
        if isinstance(entry, dict):
            assert all(one["source"] for one in (entry.values() if "source" not in entry else [entry]))


def test_a_profile_of_ones_own(tmp_path):
    values = json.loads((Path(cli.__file__).parents[1] / "facts/profiles/rtx-3060-12g.json").read_text())
    file = tmp_path / "mine.json"
    values["card"]["display"] = True
    values["link"] = {"gb_s": 7.5}
    file.write_text(json.dumps(values))
    mine, listed = read_profile(str(file)), read_profile("rtx-3060-12g")
    assert mine.card.usable_bytes == listed.card.usable_bytes - DISPLAY_BYTES and mine.link_rate == 7.5e9
    for change in ({"ram_gib": None}, {"ram_gib": -1}, {"cores": "two"}, {"link": {"gb_s": 0}}, {"card": 3}):
        file.write_text(json.dumps(values | change))
        with pytest.raises(CorruptFileError, match=r"mine\.json"):
            read_profile(str(file))
    for text in ("{", json.dumps(values | {"card": {**values["card"], "usable_gib": None}})):
        file.write_text(text)
        with pytest.raises(CorruptFileError, match=r"mine\.json.*docs/plan\.md") as caught:
            read_profile(str(file))
        assert "fetch" not in caught.value.hint
    file.write_text(
        json.dumps({"lnk": values["link"], **{key: values[key] for key in values if key != "link"}})
    )
    with pytest.raises(CorruptFileError, match=r"mine\.json does not say link\.gb_s"):
        read_profile(str(file))
    file.write_text(json.dumps(values | {"drive": "tape"}))
    with pytest.raises(UsageError, match="tape"):
        read_profile(str(file))
    with pytest.raises(UsageError, match="rtx-9090"):
        read_profile("rtx-9090")


def test_caps_leave_room_for_the_system():
    machine = replace(read_profile("rtx-3090"), assumed=False)
    capped = with_caps(machine, vram=10 * GIB, ram=64 * GIB, disk=None)
    assert capped.card.usable_bytes == 10 * GIB and capped.ram_bytes == 28 * GIB
    listed = with_caps(read_profile("rtx-3090"), vram=None, ram=64 * GIB, disk=2000 * GIB)
    assert listed.ram_bytes == 64 * GIB and listed.disk_bytes == 2000 * GIB  # its host is assumed
    assert with_caps(read_profile("rtx-3090"), **NO_CAPS).ram_bytes == 28 * GIB
    assert capped.disk_bytes == machine.disk_bytes * 19 // 20
    small = with_caps(replace(machine, ram_bytes=8 * GIB), vram=100 * GIB, ram=None, disk=1)
    assert small.ram_bytes == 8 * GIB - SYSTEM_BYTES and small.card == machine.card and small.disk_bytes == 1


@pytest.mark.parametrize(
    "wrong",
    [{"context": 0}, {"sequences": 0}, {"draft": -1}, {"host_kv": -1}, {"vram": 0}, {"kv": "fp4"},
     {"prefer": "luck"}, {"disk": -1}, {"draft": 100}, {"kv": "fp32"}],
    ids=str,
)  # fmt: skip
def test_wishes_that_mean_nothing(wrong):
    with pytest.raises(UsageError, match=str(next(iter(wrong.values())))):
        Wishes(**wrong)


def test_wishes_that_this_machine_or_this_request_cannot_mean():
    facts = known_model("qwen3.5-0.8b")
    with pytest.raises(UsageError, match=r"300,000.* has 131,072 tokens"):
        Wishes(host_kv=300_000, context=131_072)
    known = "auto, fp16, bf16, fp8, k5v4, k4v4"
    for codec in ("int4", "fp32"):
        with pytest.raises(UsageError, match=known):
            Wishes(kv=codec)
    for machine in (LAPTOP, read_profile("t4")):
        assert solve(facts, machine, Wishes(kv="auto")) == solve(facts, machine, Wishes())
    hints = set()
    for name in ("packed", "foo"):
        with pytest.raises(UsageError) as caught:
            solve(facts, LAPTOP, Wishes(recipe=name))
        hints.add(caught.value.hint)
    assert len(hints) == 1 and "int6" in hints.pop()


def test_options_that_need_a_card_and_names_that_are_nearly_right(tmp_path, capsys):
    cache = ("--cache", str(tmp_path))
    for args, text in (
        (("--tariff", "-2", "--profile", "t4"), "tariff is -2.0"),
        (("--tariff", "nan", "--profile", "t4"), "tariff is nan"),
        (("--tariff", "0.3"), "no card for --tariff."),
        (("--link", "pcie3-x4", "--vram", "4GiB"), "no card for --vram, --link."),
        (("--host-kv", "64"), "no card for --host-kv."),
    ):
        code, out, err = run(capsys, "qwen3.5-0.8b", *args, *cache)
        assert code == 2 and not out and text in err
    code, _, err = run(capsys, "qwen3.6-35b", *cache)
    assert code == 2 and "qwen3.6-35b-a3b" in err


def test_contexts_and_recipes_that_mean_nothing():
    facts, machine = known_model("qwen3-32b"), read_profile("h200")
    beyond = solve(facts, machine, Wishes(context=4 * facts.context + 1))
    assert not beyond.fits and not beyond.times and not beyond.executable and beyond.limit == 163_840
    assert [dict(offer.change) for offer in beyond.alternatives if [*offer.change] == ["context"]] == [
        {"context": 40_960}, {"context": 163_840}
    ]  # fmt: skip
    assert "DOES NOT FIT: the model reaches 163,840 tokens at most" in table(beyond)
    assert solve(facts, machine, Wishes(context=4 * facts.context)).fits
    odd = replace(known_model("qwen3.5-0.8b"), head_dim=96)
    with pytest.raises(UsageError, match="k4v4 rotates"):
        solve(odd, machine, Wishes(kv="k4v4"))
    tight = solve(
        odd, read_profile("rtx-4060-8g"), Wishes(context=1_000_000, kv="fp16", vram=2 * GIB, sequences=4)
    )
    assert {offer.change["kv"] for offer in tight.alternatives if "kv" in offer.change} <= {"fp8"}
    for name in ("int3", "9bit", "bit"):
        with pytest.raises(UsageError, match=name):
            solve(facts, machine, Wishes(recipe=name))


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = cli.run(["plan", *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


A = ("qwen3.6-35b-a3b", "--profile", "rtx-2080ti-11g", "--context", "245760", "--recipe", "int4", "--kv", "fp8",
     "--vram", "10.4GiB", "--ram", "32GiB")  # fmt: skip


def test_the_document(capsys):
    code, out, err = run(capsys, *A, "--json", "--tariff", "0.3")
    document = json.loads(out)
    assert code == 0 and not err
    assert document["version"] == 1 and document["fits"] is True and document["executable"] is True
    for name in ("device0", "host", "disk"):
        tier = document["tiers"][name]
        assert tier["total_bytes"] == sum(tier["items"].values()) <= tier["cap_bytes"]
    assert document["tiers"]["device0"]["cap_bytes"] == parse_bytes("10.4GiB")
    assert document["experts"]["total"] == 10_240 and 0 < document["experts"]["slots"] < 10_240
    assert document["kv"] == {"codec": "fp8", "bytes_per_token": 10_240}
    assert document["context"]["comfortable"] <= 245_760 <= document["context"]["limit"]
    for name in ("cold_first_token_s", "warm_ram_first_token_s", "warm_disk_first_token_s", "tail_64_s",
                 "decode_tok_s_start", "decode_tok_s_end", "load_s"):  # fmt: skip
        ends = sorted((document["predict"]["low"][name], document["predict"]["high"][name]))
        assert 0 < ends[0] <= document["predict"][name] <= ends[1]
    assert document["predict"]["measured"] is False and document["alternatives"] == []
    watt_hours = document["cost"]["watt_hours_per_million_tokens"]
    assert watt_hours == pytest.approx(1e6 / document["predict"]["decode_tok_s_total"] / 3600 * 250, rel=1e-3)
    assert document["cost"]["price_per_million_tokens"] == pytest.approx(watt_hours / 1000 * 0.3, rel=1e-3)


def test_what_does_not_fit_prints_its_document_and_ends_with_3(capsys):
    args = ("qwen3.6-27b", "--profile", "rtx-3060-12g", "--context", "131072", "--kv", "fp16")
    code, out, _ = run(capsys, *args, "--json")
    document = json.loads(out)
    assert code == 3 and document["fits"] is False and document["executable"] is False
    missing = document["tiers"]["device0"]["total_bytes"] - document["tiers"]["device0"]["cap_bytes"]
    assert document["shortfall_bytes"] == {"device0": missing}
    assert document["predict"]["decode_tok_s_end"] is None
    changes = [offer["change"] for offer in document["alternatives"]]
    assert {"model": "qwen3.6-35b-a3b"} in changes and any("context" in change for change in changes)
    code, out, _ = run(capsys, *args)
    assert code == 3 and "DOES NOT FIT: 3." in out and "fits instead: --context" in out


def test_the_table_and_the_arithmetic(tmp_path, capsys):
    code, out, _ = run(capsys, *A, "--explain")
    assert code == 0
    for text in ("never measured", "experts on the card", "device0 [", "10,240 B a token", "of 32.00 GiB",
                 "attention 4.95e15 at", "rows in chunks of 1,024 tokens: "):  # fmt: skip
        assert text in out
    profile = tmp_path / "mine.json"
    profile.write_text((Path(cli.__file__).parents[1] / "facts/profiles/rtx-3060-12g.json").read_text())
    code, out, _ = run(capsys, "qwen3-32b", "--profile", str(profile), "--ram", "64GiB", "--vram", "12GiB")
    assert "! --ram asks for 64.00 GiB, and a process can have 28.00 GiB." in out
    assert "! --vram asks for 12.00 GiB, and a process can have 11.20 GiB." in out
    code, out, _ = run(capsys, "qwen3-32b", "--profile", "rtx-3090", "--sequences", "2", "--draft", "3")
    assert code == 0 and "wait behind the others" in out and "draft heads" in out


def profile_without_card(tmp_path: Path) -> Path:
    """A machine of two cores."""
    mine = {"name": "m", "measured": False, "sources": [], "memory": {"gb_s": 40}, "drive": "nvme5",
            "ram_gib": 64, "disk_gib": 500, "cores": 2}  # fmt: skip
    profile = tmp_path / "mine.json"
    profile.write_text(json.dumps(mine))
    return profile


def test_long_times_in_hours_and_short_ones_without_false_digits(tmp_path, capsys):
    cpu = ["qwen3.5-0.8b", "--recipe", "bf16", "--ram", "8GiB", "--profile"]
    profile = profile_without_card(tmp_path)
    code, out, _ = run(capsys, *cpu, str(profile), "--context", "262144")
    document = json.loads(run(capsys, *cpu, str(profile), "--context", "262144", "--json")[1])
    seconds = document["predict"]["low"]["cold_first_token_s"]
    assert code == 0 and seconds > 3600
    line = next(line for line in out.splitlines() if line.startswith("first token, cold"))
    ends = re.fullmatch(r"first token, cold +(\d+) h (\d+) min to (\d+) h (\d+) min \(never measured\)", line)
    assert ends is not None, line
    assert 3600 * int(ends[3]) + 60 * int(ends[4]) == pytest.approx(seconds, abs=31)
    code, out, _ = run(capsys, *tiny_folder(tmp_path), "--profile", str(profile), "--context", "1024")
    assert code == 0 and "loading                   under 0.1 s (never measured)" in out


def test_kv_in_bf16_needs_a_card_of_its_own():
    """As the attention kernels do, whatever is computed in."""
    for profile, code in (("t4", "7.5"), ("rtx-3090", None)):
        plan = solve(known_model("qwen3.5-0.8b"), read_profile(profile), Wishes(context=8192, kv="bf16"))
        wanted = () if code is None else (f"bf16 on compute capability {code} (it needs 8.0)",)
        assert plan.fits and plan.unbuilt == wanted and plan.executable is (code is None)
        assert code is None or any(offer.built and "kv" in offer.change for offer in plan.alternatives)


def test_packed_weights_on_a_cpu_come_with_a_word(tmp_path):
    machine = read_profile(str(profile_without_card(tmp_path)))
    wishes = {name: Wishes(context=8192, recipe=name) for name in ("int4", "bf16")}
    said = "Packed weights may be slower on a CPU than unpacked ones: their times count bytes alone."
    model = known_model("qwen3.5-0.8b")
    assert said in solve(model, machine, wishes["int4"]).warnings
    assert said not in solve(model, read_profile("rtx-3090"), wishes["int4"]).warnings
    fast = replace(machine, memory_rate=100 * machine.memory_rate)
    for one, offered in ((machine, True), (fast, False)):
        plan = solve(model, one, wishes["bf16"])
        assert any("recipe" in offer.change for offer in plan.alternatives) is offered
        assert (said in plan.warnings) is offered


def test_what_fits_no_context_is_planned_with_a_short_one(tmp_path, capsys):
    profile = str(profile_without_card(tmp_path))
    code, out, _ = run(capsys, "qwen3.6-35b-a3b", "--profile", profile, "--ram", "4GiB", "--json")
    plan = json.loads(out)
    assert code == 3 and plan["context"]["limit"] == 0 and plan["context"]["planned"] == 8192
    changes = [offer["change"] for offer in plan["alternatives"]]
    assert any(16 * GIB < change.get("ram", 0) < 21 * GIB for change in changes), changes


def tiny_folder(tmp_path: Path) -> list[str]:
    """Arguments of a model without weights."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "intermediate_size": 128, "max_position_embeddings": 2048}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return [str(folder), "--cache", str(tmp_path / "cache")]


def test_a_folder_with_nothing_but_a_config_and_no_card(tmp_path, capsys):
    folder = tiny_folder(tmp_path)
    code, out, _ = run(capsys, *folder, "--json")
    document = json.loads(out)
    assert code == 0 and document["executable"] is True and document["machine"]["card"] is None
    assert document["tiers"]["device0"] == {"cap_bytes": 0, "total_bytes": 0, "items": {}}
    (tmp_path / "cache").mkdir()
    profile = Path(cli.__file__).parents[1] / "facts/profiles/t4.json"
    (tmp_path / "cache" / "machine.json").write_text(profile.read_text())
    code, out, _ = run(capsys, *folder, "--json")
    assert json.loads(out)["machine"]["name"] == "t4"
    code, _, err = run(capsys, "qwen2-27b")
    assert code == 2 and "qwen2-27b" in err


def test_no_torch_and_under_half_a_second():
    """Of a processor's time, so that other work on the machine does not count."""
    script = (
        "import sys; from packhorse.cli.main import run\n"
        f"code = run(['plan', *{A!r}, '--json'])\n"
        "sys.exit(code or ('torch' in sys.modules) or ('transformers' in sys.modules))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


DOCS = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()


def test_the_documentation_is_of_this_command(tmp_path, capsys):
    commands = [line.split()[1:] for line in re.findall(r"^    (packhorse plan .*)$", DOCS, re.MULTILINE)]
    assert len(commands) == 5
    for _, *args in commands:
        args[0] = "qwen3.6-35b-a3b" if args[0] == "MODEL" else args[0]
        code, out, _ = run(capsys, *args, "--json")
        document = json.loads(out)
        assert code == 0 and document["fits"]
        unlisted = {"version", "model", "machine", "recipe", "sequences", "draft", "host_kv"}
        assert {name for name in (*document, *document["predict"]) if name not in DOCS} <= unlisted
    commands = ("plan", "doctor", "serve")
    options = {
        option for name in commands for param in cli.load_command(name).params for option in param.opts
    }
    assert set(re.findall(r"--[a-z][a-z-]+", DOCS)) <= options
    own = DOCS.split("## A profile of your own\n\n")[1].split("\n\n`packhorse doctor")[0]
    (tmp_path / "mine.json").write_text(own)
    mine = read_profile(str(tmp_path / "mine.json"))
    assert mine.card.usable_bytes == parse_bytes("11.2GiB") and mine.memory_rate == 41.5e9
    missing = [cell for cell in cells() if cell not in DOCS]
    assert not missing


def cells():
    """What the four tables of the documentation say of plans."""

    def times(name, profile, context, **wishes):
        return solve(known_model(name), read_profile(profile), Wishes(context=context, **wishes)).times

    def span(found, name, digits=0):
        ends = sorted(getattr(found[band], name) for band in (LOW, HIGH))
        return "-".join(f"{end:.{digits}f}" for end in ends)

    decode, cold, ram, disk = (
        "decode_tok_s_end",
        "cold_first_token_s",
        "warm_ram_first_token_s",
        "warm_disk_first_token_s",
    )
    moe, dense, drafted = "qwen3.6-35b-a3b", "qwen3.6-27b", "qwen3.8-27b"
    a = times(moe, "rtx-2080ti-11g", 245_760)
    yield f"| {span(a, decode)} tok/s |"
    yield f"| {span(a, cold)} s |"
    yield f"| {span(a, ram, 1)} / {span(a, disk, 1)} s |"
    b = times(moe, "rtx-2080ti-22g", 32_768, sequences=2)
    yield f"| {span(b, 'decode_tok_s_start')} at the start, {span(b, decode)} at 32K |"
    yield f"| {span(times(moe, 'rtx-2080ti-22g', 2048), cold, 1)} s |"
    yield f"| {b[EXPECTED].decode_tok_s_total / b[EXPECTED].decode_tok_s_end:.1f} times |"
    c = times(dense, "rtx-3060-12g", 131_072)
    small = {"recipe": "2.5bit", "kv": "k4v4"}
    yield f"| {span(c, decode, 1)} tok/s |"
    guessed = times(dense, "rtx-3060-12g", 131_072, draft=2, **small)
    few = times(dense, "rtx-3060-12g", 131_072, **small)
    yield f"| {span(few, decode)} tok/s; with two guessed tokens {span(guessed, decode)} |"
    yield f"| cold {span(c, cold)} s; {span(c, ram, 1)} s with the KV in RAM |"
    other = times(moe, "rtx-3060-12g", 131_072)
    yield f"| {span(other, decode)} tok/s at 131,072, cold {span(other, cold)} s |"
    for context in (131_072, 262_144, 524_288):
        d = times(drafted, "rtx-3090-x2", context)
        yield f"| {span(d, decode)} tok/s |"
    yield f"| cold {span(d, cold)} s; {span(d, ram, 1)} s with the KV in RAM, {span(d, disk)} s from disk |"


MEASURED = {
    "35B, 10.4 GiB": {"cold, s": 16.11, "step, ms": 10.25, "tail of 64, s": 0.315, "tail of 256, s": 0.317,
                      "tail of 1,024, s": 0.349, "load, s": 8.5},
    "35B, no cap": {"cold, s": 16.03, "step, ms": 2.760, "load, s": 6.2},
    "35B, no cap, 32,768 tokens": {"step, ms": 2.233},
    "35B, no cap, 32,768 tokens x 2": {"step, ms": 2.605},
    "35B, no cap, 32,768 tokens x 4": {"step, ms": 3.446},
    "27B, 24 GiB": {"cold, s": 20.12, "step, ms": 8.351, "load, s": 9.3},
}  # fmt: skip
"""On one H200, 30 November 2026: benchmarks/2026-11-30-prefill.md and -experts.md. Contexts 245,760 (35B), 131,072."""
OFF = {"load, s": 0.45, "cold, s": 0.1}
"""By how much a prediction may be off, 0.15 where nothing else is said."""


def predicted(where: str) -> dict[str, float]:
    """What is planned for one of these, of its whole prompt, one question and a step of all its sequences."""
    name, _, rest = where.partition(", ")
    context = 131_072 if name == "27B" else 32_768 if "32,768" in rest else 245_760
    cap = next((size for size in ("10.4GiB", "24GiB") if size == rest.replace(" ", "")), None)
    wishes = Wishes(
        context, int(rest[-1]) if " x " in rest else 1, "fp8", "int4", vram=cap and parse_bytes(cap)
    )
    plan = solve(
        known_model("qwen3.6-27b" if name == "27B" else "qwen3.6-35b-a3b"), read_profile("h200"), wishes
    )
    # Files lay in the page cache.
    machine = replace(plan.machine, drive_rate=1e12)
    times = predict(plan.footprint, machine, plan.placement)
    step = wishes.sequences / times.decode_tok_s_total
    found = {"cold, s": times.cold_first_token_s - step, "step, ms": 1e3 * step, "load, s": times.load_s}
    for length in (64, 256, 1024):
        found[f"tail of {length:,}, s"] = tail_s(plan.footprint, machine, plan.placement, length)
    return found


def measured_rows():
    """The lines of the table of predicted and measured, and how far each may be off and is."""
    for where, figures in MEASURED.items():
        plan = predicted(where)
        for name, value in figures.items():
            off = plan[name] / value - 1
            label = f"{where}: {name}"
            yield f"| {label} | {plan[name]:#.3g} | {value} | {off:+.0%} |", OFF.get(name, 0.15), off


def test_predictions_of_the_measured_card_are_near_what_was_measured():
    for line, bound, off in measured_rows():
        assert line in DOCS and abs(off) <= bound, (line, off)


def write_tables() -> None:
    """Put the plans' cells, the last of each row, into the documentation, and the table of what was measured."""
    file, found = Path(__file__).parents[2] / "docs" / "plan.md", iter([*cells()])
    before, title, tables = file.read_text().partition("## Four machines")
    head, rule, rest = before.partition("| one H200 | predicted | measured | off |\n|---|---|---|---|\n")
    rest = rest[rest.index("\n\n") :]
    before = head + rule + "\n".join(line for line, _, _ in measured_rows()) + rest
    lines = [
        line.rstrip(" |").rpartition(" | ")[0] + " " + next(found)
        if line.startswith("| ") and not line.startswith("| |")
        else line
        for line in tables.split("\n")
    ]
    file.write_text(before + title + "\n".join(lines))


if __name__ == "__main__" and "--write" in sys.argv:
    write_tables()
