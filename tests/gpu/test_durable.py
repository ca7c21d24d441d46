"""The store's tiers on a card: restored equals uninterrupted, pages, states, logits and greedy tokens, to the bit.

python tests/gpu/test_durable.py MODEL KV STORE FILE    answers from a store in a process of its own
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
import torch

import oracle
from engines import ask, make_engine
from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import MIB
from packhorse.engine.engine import Engine
from packhorse.engine.graphs import StepGraphs
from packhorse.facts.read import read_model
from packhorse.kernels.cuda.launch import card_arch, use_arch
from packhorse.models.checkpoint import open_checkpoint
from packhorse.models.loader import load_model
from packhorse.models.model import Model
from packhorse.store import kv as kv_store
from packhorse.store import lower, slabs
from packhorse.store.durable import DurableStore
from packhorse.store.staging import Staging
from packhorse.store.transfer import gather_layer

pytestmark = pytest.mark.gpu

HYBRID, DENSE = "qwen3_5_moe", "qwen3"
IDS = oracle.random_ids(1300)
Kept = tuple[int, list[torch.Tensor]]
"""How far a prompt is kept, and the bytes of its pages in each layer and of the state at its end."""


@pytest.fixture(autouse=True)
def _whole_segments(monkeypatch):
    """Where pages do not follow on one another, attention outside of step kernels takes its sums in parts, and
    restored pages lie elsewhere: here segments are gathered, so that bits follow from positions alone."""
    monkeypatch.setattr(kv_store, "MAX_RUNS", 1)


def model_on_card(folder: Path, dtype: torch.dtype) -> Model:
    facts = read_model(folder)
    return load_model(facts, open_checkpoint(facts), dtype=dtype, device="cuda")


def tiny_model(family: str, kv: str) -> Model:
    """Computes in the type that the codec holds."""
    if kv == "bf16" and card_arch(0) < 80:
        pytest.skip("no bf16 there")
    return model_on_card(
        oracle.shared_checkpoint(family)[1], torch.bfloat16 if kv == "bf16" else torch.float16
    )


def start(model: Model, kv: str, folder: Path | None = None, *, ram: int = 0, **options) -> Engine:
    """An engine over the tiers below, as a process that starts makes it."""
    engine = make_engine(model, device="cuda", kv=kv, **options)
    disk = None if folder is None else DurableStore(folder, quota=256 * MIB, reserve=0)
    number = 0
    if disk is not None:
        disk._writer.execute("PRAGMA synchronous = OFF")
        number = disk.add_model(b"tiny", {"page_len": 64})
    engine.store.add_tiers(ram_bytes=ram, disk=disk, model=number, min_tokens=1)
    # To read a tiny model's prompts anew may be as fast as to load them: here all are loaded.
    engine.store.lower.note_compute = lambda tokens, seconds: None
    return engine


def kept(engine: Engine, ids: list[int]) -> Kept:
    store = engine.store
    match = store.match([*ids, 0])
    page_ids = [page for entry in match.entries for page in entry.page_ids]
    found = [store._tier.pages(layer)[page_ids].cpu() for layer in store.geometry.full_layers]
    if store.geometry.is_hybrid:
        found.append(store._tier.state_record(match.entries[-1].snapshot).cpu())
    return match.length, found


def answer(engine: Engine, ids: list[int], max_tokens: int = 4, marks: tuple[int, ...] = ()):
    """Tokens, logits of each, what is kept of the prompt, and tokens that were reused."""
    engine.runner.logits.clear()
    tokens, event = ask(engine, ids, max_tokens=max_tokens, marks=marks)
    rows = torch.stack([row for _, row in sorted(engine.runner.logits.items())]).cpu()
    return tokens, rows, kept(engine, ids), event.usage.cached_len


def check(got, want, reused: int | None = None) -> None:
    assert got[0] == want[0] and torch.equal(got[1], want[1])
    assert got[2][0] == want[2][0] > 0 and all(map(torch.equal, got[2][1], want[2][1]))
    assert got[3] == (want[3] if reused is None else reused)


def forget(engine: Engine) -> None:
    """The device gives everything up."""
    while engine.store._evict_leaf():
        pass
    assert not engine.store.stats.entries


@pytest.mark.parametrize("kv", ["fp16", "bf16", "fp8", "k5v4", "k4v4"])
@pytest.mark.parametrize("family", [HYBRID, DENSE])
def test_every_codec_through_every_tier(tmp_path, family, kv):
    """Read, demoted, promoted, written, and read by another engine: the very same prompt each time."""
    model, ids = tiny_model(family, kv), IDS[:300]
    engine = start(model, kv, tmp_path / "s", ram=32 * MIB)
    want = answer(engine, ids)
    check(answer(engine, ids), want, 256)
    forget(engine)
    check(answer(engine, ids), want, 256)
    counters = engine.store.lower.counters
    assert counters["hits_ram"] == 1 and counters["unpinned_images"] == 0
    assert counters["restored_pinned_bytes"] == counters["restored_ram_bytes"] > 0
    engine.close()
    engine = start(model, kv, tmp_path / "s")
    check(answer(engine, ids), want, 256)
    assert engine.store.lower.counters["hits_disk"] == 1
    engine.close()


@pytest.mark.parametrize(("family", "kv"), [(HYBRID, "fp8"), (DENSE, "k5v4")])
def test_forks_edits_and_turns(tmp_path, family, kv):
    """An engine that keeps all of it on the card, one that gives all up after each request, and new ones."""
    model, base = tiny_model(family, kv), IDS[:300]
    prompts = [
        base,
        base,
        base[:150] + IDS[400:460],
        base[:150] + IDS[500:560],
        base[:100] + [5] + base[101:],
    ]
    whole, demoting = start(model, kv), start(model, kv, ram=64 * MIB)
    turn: list[int] = []
    for prompt in [*prompts, base]:
        want = answer(whole, prompt, 70)
        check(answer(demoting, prompt, 70), want)
        forget(demoting)
        engine = start(model, kv, tmp_path / "s")
        check(answer(engine, prompt, 70), want)
        engine.close()
        turn = turn or base + want[0] + IDS[600:640]
    assert want[3] == 256
    want = answer(whole, turn)
    assert want[3] >= 320, "the turn goes on from the answer's end"
    check(answer(demoting, turn), want)
    assert demoting.store.lower.counters["hits_ram"] >= 4


def test_residues_of_the_page_size(tmp_path):
    model = tiny_model(HYBRID, "fp8")
    engine = start(model, "fp8", tmp_path / "s")
    answer(engine, IDS[:320], 1)
    engine.close()
    for length in (257, 258, 271, 272, 273, 288, 319, 320):
        want = answer(start(model, "fp8"), IDS[:length], 1)
        engine = start(model, "fp8", tmp_path / "s")
        check(answer(engine, IDS[:length], 1), want, 256)
        engine.store.lower._jobs.clear()  # nothing is written that would make the next length's restore another
        engine.close()


def test_in_a_new_process(tmp_path):
    """256 greedy tokens after a document that another process has read."""
    wants, commands = [], []
    for family, kv in ((HYBRID, "fp8"), (DENSE, "k4v4")):
        engine = start(tiny_model(family, kv), kv, tmp_path / kv)
        answer(engine, IDS[:300], 2)
        wants.append(answer(engine, IDS[:300], 256))
        engine.close()
        folder = oracle.shared_checkpoint(family)[1]
        commands += [str(folder), kv, str(tmp_path / kv), str(tmp_path / f"{kv}.pt")]
    command = [sys.executable, __file__, str(card_arch(0)), *commands]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, timeout=120, env=paths)
    for want, kv in zip(wants, ("fp8", "k4v4"), strict=True):
        check(torch.load(tmp_path / f"{kv}.pt"), want, 256)


def test_streamed_experts_and_sweeps(tmp_path):
    """Experts in host memory, prompts and questions in sweeps, answers by captured steps."""
    # What these need is not needed in a process that only answers.
    from test_graphs import tiny
    from test_layer_sweep import SWEEP
    from test_streamed_experts import streamed

    model = tiny(HYBRID, torch.float16, True)
    experts, arena = streamed(model, 0.3)
    options = {"snapshot_len": 512, "snapshots": 40, "sequences": 1, **SWEEP}

    def engine_of(folder: Path | None = None, ram: int = 0) -> Engine:
        engine = start(model, "fp8", folder, ram=ram, **options)
        engine.runner.graphs = StepGraphs(model, engine.store, experts, sequences=1, max_len=4096)
        return engine

    document, marks = IDS[:1100], (1100,)
    prompts = [document + IDS[1100:1170], document + IDS[1200:1230], document + IDS[1100:1170]]
    whole, demoting = engine_of(), engine_of(ram=64 * MIB)
    for number, prompt in enumerate(prompts):
        want = answer(whole, prompt, 64, marks)
        assert want[3] == (0, 1088, 1152)[number]
        check(answer(demoting, prompt, 64, marks), want)
        forget(demoting)
        engine = engine_of(tmp_path / "s")
        check(answer(engine, prompt, 64, marks), want)
        engine.close()
    assert demoting.store.lower.counters["hits_ram"] == 2
    assert experts.poisoned > 100 and whole.sweeper.num_units > 0
    arena.close()


@pytest.fixture
def sent(monkeypatch) -> list:
    """Copies are late; those that were sent."""
    sending, sent = Staging.sending, []

    @contextmanager
    def late(self, *behind):
        with sending(self, *behind):
            torch.cuda._sleep(20_000_000)  # some 10 ms, before the copies
            sent.append(behind)
            yield

    monkeypatch.setattr(Staging, "sending", late)
    return sent


def use_small_slots(engine: Engine) -> None:
    """From now on a slot holds one page of one layer."""
    store = engine.store
    store.lower._staging.size = store.geometry.codec.page_bytes


@pytest.fixture(params=[True, False], ids=["slabs", "slots"])
def pinned(request, monkeypatch) -> bool:
    """Images of host memory have a page each, in pinned slabs or where the system pins none for them."""

    def refuse(size: int) -> None:
        raise DoesNotFitError("No.", asked=size, available=0, unit="bytes")

    monkeypatch.setattr(lower, "IMAGE_BYTES", 1)
    if not request.param:
        monkeypatch.setattr(lower, "PinnedArena", refuse)
    return request.param


def came_back(engine: Engine, *, pinned: bool) -> None:
    """Something did, once, from there."""
    counters = engine.store.lower.counters
    assert counters["hits_ram"] == 1
    assert (counters["unpinned_images"] == 0) is (counters["restored_pinned_bytes"] > 0) is pinned


@pytest.mark.parametrize("family", [HYBRID, DENSE])
def test_slow_copies_are_waited_for(tmp_path, monkeypatch, family, sent, pinned):
    """Up and down: nothing is computed from what has not arrived, nothing is written that had not left."""
    monkeypatch.setattr(lower, "EXTENT_BYTES", 1)  # a page each, more of them than slots
    model = tiny_model(family, "fp8")
    want = answer(start(model, "fp8"), IDS[:1290], 3)
    engine = start(model, "fp8", tmp_path / "s", ram=32 * MIB)
    check(answer(engine, IDS[:1290], 3), want)
    engine.store.lower.advance(1 << 62, wait=True)
    forget(engine)  # its pages and states are NaN from now on
    before, store = len(sent), engine.store
    assert before >= 20
    use_small_slots(engine)
    torch.cuda._sleep(200_000_000)  # and are so again, some 100 ms later: copies come behind that
    for layer in store.geometry.full_layers:
        store._tier.pages(layer).fill_(0xFF)
    check(answer(engine, IDS[:1290], 3), want, 1280)
    assert len(sent) >= before + (1 if pinned else 20) * len(store.geometry.full_layers)
    came_back(engine, pinned=pinned)
    engine.close()
    engine = start(model, "fp8", tmp_path / "s")
    check(answer(engine, IDS[:1290], 3), want, 1280)
    assert engine.store.lower.counters["unpinned_staging"] == 0
    engine.close()


def test_a_captured_step_waits_for_all_layers(sent, pinned):
    """Of a prompt that leaves it one token to read."""
    model = tiny_model(DENSE, "fp8")

    def engine_of(ram: int = 0) -> Engine:
        engine = start(model, "fp8", ram=ram)
        engine.runner.graphs = StepGraphs(model, engine.store, None, sequences=4, max_len=4096, capture=False)
        return engine

    want = answer(engine_of(), IDS[:1281], 3)
    engine = engine_of(32 * MIB)
    check(answer(engine, IDS[:1281], 3), want)
    forget(engine)
    use_small_slots(engine)
    steps = engine.runner.graphs.num_steps
    check(answer(engine, IDS[:1281], 3), want, 1280)
    assert engine.runner.graphs.num_steps == steps + 3 and len(sent) >= (3 if pinned else 40)
    came_back(engine, pinned=pinned)
    engine.close()


@pytest.mark.parametrize(("family", "ram"), [(HYBRID, 7 << 17), (DENSE, 3 << 19)])
def test_slabs_are_used_again_while_copies_are_late(monkeypatch, family, ram, sent):
    """Of two prompts host memory has room for one: while one comes back the other takes its place there."""
    monkeypatch.setattr(lower, "IMAGE_BYTES", 1)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1 << 18)
    monkeypatch.setattr(slabs, "_GRAIN", 1 << 16)
    model, prompts = tiny_model(family, "fp8"), [IDS[:1290], oracle.random_ids(1290, seed=1)]
    wants = [answer(start(model, "fp8"), prompt, 3) for prompt in prompts]
    engine = start(model, "fp8", ram=ram)
    store = engine.store
    open_sequence, below = store.open, store.lower

    def open_and_forget(*args, **options):
        sequence = open_sequence(*args, **options)
        forget_rest(store)
        return sequence

    monkeypatch.setattr(store, "open", open_and_forget)
    for turn in range(6):
        check(answer(engine, prompts[turn % 2], 3), wants[turn % 2], 1280 if turn > 1 else 0)
    assert (
        below.counters["hits_ram"] == 4 and below.counters["unpinned_images"] == 0 and below.ram.evicted > 20
    )
    assert below.counters["restored_pinned_bytes"] == below.counters["restored_ram_bytes"] > 0
    views = [torch.frombuffer(image.place.view, dtype=torch.uint8) for image in below.ram._images.values()]
    assert all(view.is_pinned() for view in views) and below.ram.used <= below.ram.capacity
    store.clear()
    assert not any(view.is_pinned() for view in views) and below.ram.used == 0
    check(answer(engine, prompts[0], 3), wants[0], 0)
    engine.close()


def forget_rest(store: kv_store.KVStore) -> None:
    """The device gives up what no open sequence uses."""
    while store._evict_leaf():
        pass


def test_seconds_are_the_card_s():
    """Those of the copies, known when they have arrived."""
    engine = start(tiny_model(DENSE, "fp8"), "fp8", ram=64 * MIB)
    answer(engine, IDS[:1290], 3)
    forget(engine)
    answer(engine, IDS[:1290], 3)
    below = engine.store.lower
    engine.close()
    seconds = below.counters["restore_microseconds"] / 1e6
    assert 0 < seconds < 1 and below.counters["restored_ram_bytes"] / seconds < 200e9


def test_first_layers_compute_while_the_last_are_copied(monkeypatch, pinned):
    """From host memory: the last layer's pages are not even gathered before the first has been computed. In slabs
    nothing is gathered."""
    model = tiny_model(DENSE, "fp8")
    engine = start(model, "fp8", ram=32 * MIB)
    want = answer(engine, IDS[:1290], 3)
    forget(engine)
    use_small_slots(engine)
    first, last = engine.store.geometry.full_layers
    reached, order, arrive = Event(), [], lower.LowerTiers.arrive

    def note(self, layer=None):
        if layer == last:
            reached.set()
        arrive(self, layer)

    def hold_up(parts, layer, *others):
        assert layer == first or reached.wait(20)
        order.append(layer)
        return gather_layer(parts, layer, *others)

    monkeypatch.setattr(lower.LowerTiers, "arrive", note)
    monkeypatch.setattr(lower.transfer, "gather_layer", hold_up)
    check(answer(engine, IDS[:1290], 3), want, 1280)
    assert order == ([] if pinned else [first] * 20 + [last] * 20)
    came_back(engine, pinned=pinned)
    engine.close()


def main(arch: str, *work: str) -> None:
    """Each four of `work`: folder of the model, codec, store, and the file that gets the answer."""
    if card_arch(0) != int(arch):
        use_arch(int(arch))
    for folder, kv, store, file in zip(*[iter(work)] * 4, strict=True):
        engine = start(model_on_card(Path(folder), torch.float16), kv, Path(store))
        torch.save(answer(engine, IDS[:300], 256), file)
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
