"""Restored equals uninterrupted, to the bit, in exact mode: models, codecs, tiers, residues, forks, restarts."""

import tempfile
from functools import cache
from pathlib import Path
from random import Random

import pytest
import test_engine_machine as machines
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

import oracle
from engines import ask, make_engine, tiny_model
from packhorse.core.units import MIB
from packhorse.store.durable import DurableStore

HYBRID, DENSE = "qwen3_5_moe", "qwen3"
IDS = oracle.random_ids(900)
SLOW = pytest.mark.slow


def start(family: str, folder: Path | None, *, ram: int = 0, kv: str | None = None, **options):
    """An engine as a process that starts makes it, over the tiers below."""
    engine = make_engine(tiny_model(family, True), kv=kv, **options)
    disk = None if folder is None else DurableStore(folder, quota=512 * MIB, reserve=0)
    if disk is not None:
        disk._writer.execute("PRAGMA synchronous = OFF")
    number = 0 if disk is None else disk.add_model(b"tiny", {"page_len": 64})
    engine.store.add_tiers(ram_bytes=ram, disk=disk, model=number, min_tokens=1)
    return engine


def logits(engine, name: str) -> list[torch.Tensor]:
    """Of each sampled row of a request, in order."""
    return [row for (request, _), row in sorted(engine.runner.logits.items()) if request == name]


def same(engine, ids, want, *, name: str = "r", max_tokens: int) -> int:
    """Asks, and compares tokens and logits with those of the engine `want`; tokens that were reused."""
    tokens, event = ask(engine, ids, max_tokens=max_tokens, name=name)
    assert tokens == want[0]
    for got, expected in zip(logits(engine, name), want[1], strict=True):
        assert torch.equal(got, expected)
    return event.usage.cached_len


@cache
def uninterrupted(family: str, kv: str | None, ids: tuple[int, ...], max_tokens: int):
    """Tokens and logits of a request that is all an engine ever computes."""
    engine = make_engine(tiny_model(family, True), kv=kv)
    tokens, _ = ask(engine, ids, max_tokens=max_tokens)
    return tokens, logits(engine, "r")


CODECS = [(HYBRID, kv) for kv in (None, "fp16", "bf16", "fp8", "k5v4", "k4v4")] + [
    (DENSE, kv) for kv in (None, "k5v4")
]


@pytest.mark.parametrize(("family", "kv"), CODECS)
def test_every_codec_through_every_tier(tmp_path, family, kv):
    ids = IDS[:300]
    want = uninterrupted(family, kv, tuple(ids), 6)
    engine = start(family, tmp_path / "s", ram=8 * MIB, kv=kv)
    assert same(engine, ids, want, max_tokens=6) == 0
    while engine.store._evict_leaf():
        pass
    assert same(engine, ids, want, max_tokens=6) == 256
    assert engine.store.lower.counters["hits_ram"] == 1
    engine.close()
    engine = start(family, tmp_path / "s", kv=kv)
    assert same(engine, ids, want, max_tokens=6) == 256
    assert engine.store.lower.counters["hits_disk"] == 1
    engine.close()
    other = start(family, tmp_path / "s", kv="fp8" if kv != "fp8" else None)
    assert (
        same(other, ids, uninterrupted(family, "fp8" if kv != "fp8" else None, tuple(ids), 6), max_tokens=6)
        == 0
    )
    assert other.store.lower.counters["miss_shape"] > 0, "even without an identity the shapes are compared"


@pytest.mark.slow
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_every_family(tmp_path, family):
    test_every_codec_through_every_tier(tmp_path, family, None)


@pytest.mark.parametrize(("family", "step"), [(HYBRID, 1), (DENSE, 9), pytest.param(DENSE, 1, marks=SLOW)])
def test_every_residue_of_the_page_size(tmp_path, family, step):
    engine = start(family, tmp_path / "s")
    ask(engine, IDS[:192])
    engine.close()
    for length in range(129, 193, step):
        engine = start(family, tmp_path / "s", num_pages=8)
        want = uninterrupted(family, None, tuple(IDS[:length]), 1)
        assert same(engine, IDS[:length], want, max_tokens=1) == 128
        # Nothing is written that would make the next length's restore another.
        engine.store.lower._jobs.clear()
        engine.close()


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param(DENSE, marks=SLOW)])
def test_256_tokens_after_a_restart(tmp_path, family):
    ids = IDS[:500]
    want = uninterrupted(family, None, tuple(ids), 256)
    engine = start(family, tmp_path / "s")
    ask(engine, ids, max_tokens=80)
    engine.close()
    engine = start(family, tmp_path / "s")
    assert same(engine, ids, want, max_tokens=256) == 448
    engine.close()
    # And from the middle of its own answer: the last snapshot in it is the first answer's end.
    engine = start(family, tmp_path / "s")
    longer = ids + want[0][:200]
    reused = same(engine, longer, (want[0][200:208], want[1][200:208]), max_tokens=8)
    assert reused == (640 if family == DENSE else 576)
    engine.close()


@pytest.mark.parametrize("family", [HYBRID, DENSE])
def test_edits_forks_and_regenerated_answers_in_processes_of_their_own(tmp_path, family):
    base, random = IDS[:400], Random(1)
    prompts = [base, base, base[:200] + [5] + base[201:], base[:200] + [6, 7], base[:200] + [6, 7, 8], base]
    prompts += [base[: random.randrange(70, 400)] + [9] * random.randrange(1, 70) for _ in range(4)]
    reused = []
    for prompt in prompts:
        engine = start(family, tmp_path / "s")
        want = uninterrupted(family, None, tuple(prompt), 3)
        reused.append(same(engine, prompt, want, max_tokens=3))
        engine.close()
    # A template that drops an answer's thoughts: the turn after it goes on from where they began.
    thought, rest = [11] * 90, [12] * 100
    for prompt in (base + thought + rest, base + rest):
        engine = start(family, tmp_path / "s")
        want = uninterrupted(family, None, tuple(prompt), 3)
        reused.append(same(engine, prompt, want, max_tokens=3))
        engine.close()
    assert reused[-2:] == [384, 384]
    assert reused[:2] == [0, 384] and reused[5] == 384
    assert reused[4] == 192, "where two prompts part there is a snapshot"


def test_an_answer_does_not_wait_for_what_it_leaves_on_the_disk(tmp_path):
    engine = start(DENSE, tmp_path)
    ask(engine, IDS[:200], max_tokens=1)
    assert engine.is_behind  # the answer is out, and nothing of its prompt has been copied
    ask(engine, IDS[200:230], max_tokens=1)  # no whole page, nothing to keep: its step began with what waited
    assert not engine.is_behind
    engine.flush()
    assert engine.store.lower.events["disk_written_bytes"] > 0


class StoreMachine(machines.EngineMachine):
    """Requests, cancels, restarts and damaged files, over all tiers."""

    @initialize(
        sequences=st.integers(1, 3),
        chunk=st.sampled_from([64, 128]),
        ram=st.sampled_from([0, 600_000, 4 * MIB]),
    )
    def start(self, sequences, chunk, ram):
        self.folder = tempfile.TemporaryDirectory()
        self.options = {
            "num_pages": machines.NUM_PAGES, "chunk_len": chunk, "snapshot_len": 128, "snapshots": 3,
            "sequences": sequences, "window": machines.WINDOW, "ram": ram,
        }  # fmt: skip
        self.engine = start(self.family, Path(self.folder.name) / "s", **self.options)
        self.asked, self.answers, self.ended, self.count = {}, {}, {}, 0
        self.hits = 0

    @precondition(lambda self: hasattr(self, "engine") and not self.engine.has_work)
    @rule(damage=st.integers(0, 5), where=st.floats(0, 1))
    def restart(self, damage, where):
        self.engine.close()
        paths = sorted((Path(self.folder.name) / "s" / "models").glob("*/*"))
        for path in paths[:damage]:
            data = bytearray(path.read_bytes())
            data[int(where * (len(data) - 1))] ^= 1
            path.write_bytes(data)
        self.engine = start(self.family, Path(self.folder.name) / "s", **self.options)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            for event in self.engine.step():
                self.note(event)
        self.engine.flush()
        super().teardown()
        self.engine.close()
        self.folder.cleanup()


@pytest.mark.parametrize(("family", "examples"), [(HYBRID, 5), ("llama", 6)])
def test_random_requests_and_restarts(family, examples):
    machines.drive(StoreMachine, family, examples, steps=25, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_many_random_requests_and_restarts(family):
    machines.drive(StoreMachine, family, 100, steps=50, derandomize=False)
