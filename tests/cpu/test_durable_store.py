"""Host memory and disk below the device, over a stand-in for a model: what comes back is what was there.

Everything that `store_model` reads is compared with what the tokens alone say must be there.
"""

import errno
import os
from pathlib import Path
from random import Random
from threading import Event

import pytest

import store_model as model
from packhorse.core.units import MIB
from packhorse.store import lower
from packhorse.store.documents import NewDocument, add_document
from packhorse.store.durable import DurableStore, wipe
from packhorse.store.files import FileSystem
from packhorse.store.kv import KVStore
from packhorse.store.prefix import encode_tokens

KINDS = {"dense": {}, "hybrid": {"hybrid": True}, "exact": {"hybrid": True, "exact": True}}
SEED = b"of this model"


class NoSync(FileSystem):
    """Does not wait for a disk."""

    def fsync(self, fd):
        pass


def make(
    folder: Path | None, kind: str = "dense", *, ram: int = 0, seed: bytes = SEED, files=None, **settings
):
    """A store as a process that starts makes it."""
    disk = model_number = None
    if folder is not None:
        disk = DurableStore(folder, quota=64 * MIB, reserve=0, files=files or NoSync())
        disk._writer.execute("PRAGMA synchronous = OFF")  # no machine fails here, and time is short
        model_number = disk.add_model(seed, {"name": "stand-in", "page_len": "4"})
        settings |= {"secret": disk.secret}
    store = model.make_store(seed=seed, **(KINDS[kind] | settings))
    store.add_tiers(ram_bytes=ram, disk=disk, model=model_number or 0, min_tokens=1)
    return store


def flush(store: KVStore) -> None:
    store.lower.flush()
    model.check(store)


def run(store: KVStore, prompt, generated=(), **options) -> int:
    """As model.run, with the write behind it ended; how many tokens were reused."""
    prompt = list(prompt)
    sequence = store.open(prompt, len(prompt) + len(generated), **options)
    model.prefill(store, sequence)
    for token in generated:
        model.run_step(store, [(sequence, [token])])
    store.close(sequence)
    flush(store)
    return sequence.cached_len


def tokens(length: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(200), k=length)


@pytest.mark.parametrize("kind", KINDS)
def test_every_residue_comes_back_in_a_new_process(tmp_path, kind):
    for length in range(1, 14):
        prompt = tokens(length, seed=length)
        store = make(tmp_path / "s", kind)
        assert run(store, prompt, [7, 8]) == 0
        store.close_tiers()
        store = make(tmp_path / "s", kind)
        last = (length - 1) // 4 * 4
        assert run(store, prompt) == last
        assert run(store, [*prompt, 7, 8, 9]) >= last
        store.close_tiers()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["ram", "disk"])
def test_forks_and_edits(tmp_path, kind, where):
    """What agrees is reused to the last snapshot before the fork, the second time to the fork itself."""
    options = {"ram": MIB} if where == "ram" else {}
    folder = tmp_path / "s" if where == "disk" else None
    store = make(folder, kind, num_pages=40, **options)
    base = tokens(40)
    run(store, base, marks=[24])
    edited = [*base[:33], 999, *base[34:]]

    def leave():
        nonlocal store
        if where == "ram":
            while store._evict_leaf():
                pass
            assert store.stats.entries == 0
        else:
            store.close_tiers()
            store = make(folder, kind, num_pages=40)

    leave()
    assert run(store, edited) == (32 if kind == "dense" else 24)
    leave()
    assert run(store, edited) == 36
    leave()
    assert run(store, [*base[:33], 5, 5, 5]) == 32, "the fork has a snapshot now"
    leave()
    assert run(store, base) == 36
    assert store.lower.counters["hits"] >= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ram", [MIB, 120_000])
def test_demoted_and_promoted(kind, ram):
    """Evicted prompts come back from host memory; beyond its size the oldest are lost."""
    store = make(None, kind, ram=ram, num_pages=12)
    prompts = [tokens(40, seed) for seed in range(6)]
    for prompt in prompts:
        assert run(store, prompt) == 0
    back = sum(run(store, prompt) >= 32 for prompt in prompts)
    assert store.lower.ram.used <= ram
    if ram == MIB:
        assert back == 6 and store.lower.counters["hits_ram"] >= 5
    else:
        assert store.lower.ram.evicted > 0
    store.clear()
    assert store.lower.ram.used == 0
    assert run(store, prompts[-1]) == 0


def test_identities_do_not_meet(tmp_path):
    """Another seed (weights, tokenizer, rope, codec), tenant or secret: nothing is found."""
    folder, prompt = tmp_path / "s", tokens(40)
    store = make(folder)
    run(store, prompt, tenant=b"alice")
    assert run(store, prompt, tenant=b"bob") == 0
    store.close_tiers()
    store = make(folder, seed=b"of another model")
    assert run(store, prompt, tenant=b"alice") == 0
    store.close_tiers()
    store = make(folder)
    assert run(store, prompt) == 0
    assert run(store, prompt, tenant=b"alice") == 36
    store.close_tiers()
    (folder / "secret").write_bytes(bytes(32))
    assert run(make(folder), prompt, tenant=b"alice") == 0


def test_nothing_is_kept_of_what_must_not_be(tmp_path):
    folder, prompt = tmp_path / "s", tokens(40)
    store = make(folder, "hybrid", ram=MIB, num_pages=30)
    assert run(store, prompt, [1, 2, 3, 4, 5], keep=False) == 0
    assert store.stats.entries == 0 and store.lower.disk.usage()["records"] == 0
    run(store, prompt)
    held = store.lower.disk.usage()["records"]
    assert run(store, [*prompt, *prompt], keep=False) == 40
    assert store.lower.disk.usage()["records"] == held


def test_too_short_is_not_written(tmp_path):
    store = make(tmp_path / "s")
    store.lower.min_pages = 11
    run(store, tokens(40))
    assert store.lower.counters["skipped_short"] == 1 and store.lower.disk.usage()["records"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_short_and_has_no_name_is_written_when_it_comes_again(tmp_path, kind):
    """As far as it does, and of a hybrid model up to a state; what is long, or has a name, at once."""
    store = make(tmp_path / "s", kind, num_pages=200)
    store.lower.min_pages, store.lower.long_pages = 3, 20
    counters, disk = store.lower.counters, store.lower.disk

    def written() -> list[int]:
        return sorted(stop for (stop,) in disk.query("SELECT max(stop) FROM records GROUP BY tokens != ''"))

    begin = tokens(25)
    run(store, [*begin, *tokens(16, 1)])
    assert (counters["skipped_once"], disk.usage()["records"]) == (1, 0)
    run(store, [*begin, *tokens(16, 2)], marks=[25])
    assert (counters["skipped_once"], counters["cut_once"]) == (1, 1)
    assert set(written()) == {24}, "the pages that both have, and a state there"
    run(store, [*begin, *tokens(16, 2)])
    assert counters["cut_once"] == 1 and set(written()) == {40}, "all of it came again"
    held = disk.usage()["records"]
    run(store, [*begin[:8], *tokens(16, 3)])
    assert counters["skipped_once"] == 2 and disk.usage()["records"] == held, "what came again is too short"
    run(store, tokens(20, 4), label="x")
    run(store, tokens(90, 5))
    assert (counters["skipped_once"], counters["cut_once"]) == (2, 1) and disk.usage()["records"] > held + 1
    run(store, [*tokens(90, 5)[:30], *tokens(9, 6)], marks=[30])
    assert counters["cut_once"] == 2, "a long one counts as having come by"
    run(store, begin[:9])
    assert counters["skipped_short"] == 1
    store.close_tiers()
    store = make(tmp_path / "s", kind, num_pages=200)
    assert run(store, [*begin, *tokens(16, 2)], keep=False) == 40
    assert run(store, [*begin, *tokens(16, 1)], keep=False) == 24


def test_what_is_known_of_chains_that_came_by_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(lower, "SEEN_PAGES", 20)
    store = make(tmp_path / "s")
    store.lower.long_pages = 100
    for seed in (1, 2, 3, 1):
        run(store, tokens(40, seed))
        assert len(store.lower._seen) <= 20
    assert store.lower.counters["skipped_once"] == 4, "all was forgotten meanwhile"
    run(store, tokens(40, 1))
    assert store.lower.disk.usage()["records"] == 1


def test_what_is_slower_to_load_is_read_again(tmp_path):
    store = make(tmp_path / "s")
    run(store, tokens(40))
    store.close_tiers()
    store = make(tmp_path / "s")
    store.lower.note_compute(10**9, 1.0)
    assert run(store, tokens(40)) == 36, "what has not been measured is loaded"
    store.clear()
    assert run(store, tokens(40)) == 0 and store.lower.counters["miss_slower"] == 1


def test_more_than_the_quota_is_not_begun(tmp_path, monkeypatch):
    store = make(tmp_path / "s", num_pages=200)
    monkeypatch.setattr(store.lower.disk, "room", lambda by_quota=False: 1000)
    run(store, tokens(400))
    assert store.lower.counters["skipped_large"] == 1 and store.lower.disk.usage()["records"] == 0


def test_a_chain_written_in_batches_loses_its_end_first(tmp_path, monkeypatch):
    """Without a use that they share the first batch would go, and the others were of no use."""
    for name in ("BATCH_BYTES", "EXTENT_BYTES"):
        monkeypatch.setattr(lower, name, 1)
    store = make(tmp_path / "s")
    run(store, tokens(40))
    disk = store.lower.disk
    monkeypatch.setattr(disk, "_index_bytes", lambda: 0)  # a deletion makes its log grow
    disk._evict_to(disk._held() * 7 // 10)
    assert disk.counters["evicted_records"] == 3
    store.close_tiers()
    assert run(make(tmp_path / "s"), tokens(40)) == 28


class Broken(NoSync):
    """Flips a bit of every read while `flip`, and fails every write while `fail`."""

    flip = False
    fail = 0

    def read(self, fd, buffer, offset):
        count = super().read(fd, buffer, offset)
        if self.flip:
            buffer[count // 2] ^= 4
        return count

    def write(self, fd, data):
        if self.fail:
            raise OSError(self.fail, os.strerror(self.fail))
        return super().write(fd, data)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_a_miss_and_then_trouble(tmp_path, kind):
    store = make(tmp_path / "s", kind, num_pages=40)
    for seed in range(4):
        run(store, tokens(40, seed))
    store.close_tiers()
    files = Broken()
    store = make(tmp_path / "s", kind, num_pages=40, files=files)
    files.flip = True
    for seed in range(4):
        assert store.lower.trouble == "" or seed >= lower.FAILURES
        assert run(store, tokens(40, seed)) == 0
    assert store.lower.counters["miss_checksum"] >= 4 and store.lower.counters["hits"] == 0
    assert "could not be read" in store.lower.trouble
    files.flip = False
    store.clear()
    assert run(store, tokens(40, 0)) == 36, "it was written again"
    assert store.lower.trouble == ""


def test_what_is_damaged_and_read_again_is_pinned_again(tmp_path):
    """Whoever pinned it has not changed his mind; what is pinned is what eviction passes over."""
    store = make(tmp_path / "s", num_pages=40)
    disk = store.lower.disk
    run(store, tokens(40, 1))
    run(store, tokens(40, 2))
    _, prefix = disk.prefixes()
    disk.set_pinned(prefix, True)
    pinned = disk.query("SELECT parent, key FROM records WHERE pinned")
    assert pinned and len(pinned) < disk.usage()["records"]
    store.close_tiers()
    for path in (tmp_path / "s").glob("models/*/*"):
        path.write_bytes(path.read_bytes()[:-1])
    store = make(tmp_path / "s", num_pages=40)
    for seed in (1, 2):
        assert run(store, tokens(40, seed)) == 0
    assert store.lower.disk.query("SELECT parent, key FROM records WHERE pinned") == pinned


def test_a_disk_that_fails_loses_no_request(tmp_path):
    files = Broken()
    store = make(tmp_path / "s", files=files)
    files.fail = errno.ENOSPC
    assert run(store, tokens(40)) == 0
    assert "No space left" in store.lower.trouble
    assert run(store, tokens(40)) == 36, "the device has it"
    files.fail = 0
    run(store, tokens(40))
    assert store.lower.trouble == ""
    store.close_tiers()
    assert run(make(tmp_path / "s"), tokens(40)) == 36


def test_what_is_not_found_again_is_trouble(tmp_path, monkeypatch):
    """A store that takes everything and gives nothing back says so, not years later."""
    store = make(tmp_path / "s")
    monkeypatch.setattr(store.lower.disk, "candidates", lambda parents: [])
    run(store, tokens(40))
    assert store.lower.counters["not_found_again"] == 1
    assert "of 10 pages just written 0 are found" in store.lower.trouble


def test_want_of_memory_ends_no_request(tmp_path, monkeypatch):
    store = make(tmp_path / "s", ram=MIB, num_pages=12)

    def refuse(*_):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(lower.Image, "make", refuse)
    for seed in range(3):
        assert run(store, tokens(40, seed)) == 0
    assert store.lower.counters["failed_copies"] == 3 and store.lower.counters["failed_demotions"] > 0
    monkeypatch.undo()
    run(store, tokens(40, 9))
    store.close_tiers()
    assert run(make(tmp_path / "s"), tokens(40, 9)) == 36


@pytest.mark.parametrize("at_close", [False, True])
def test_whoever_waits_for_a_copy_that_fails_is_told(tmp_path, monkeypatch, at_close):
    """A card that has gone: the error is raised, nobody waits for ever, and the folder is let go of."""
    store = make(tmp_path / "s", num_pages=40)
    told = []
    for seed in range(3):
        sequence = store.open(tokens(40, seed), 40)
        model.prefill(store, sequence)
        store.close(sequence)
        told.append(store.lower.after_writing(lambda store=store: store.lower.disk.usage()["records"]))

    def refuse(*_):
        raise RuntimeError("the card has gone")

    monkeypatch.setattr(store.lower, "_save_behind", refuse)
    if not at_close:
        with pytest.raises(RuntimeError, match="has gone"):
            store.lower.advance(1 << 20)
        assert told[0].result(timeout=10) == 0 and store.lower.counters["failed_copies"] == 1
        monkeypatch.undo()
        flush(store)
        assert [future.result(timeout=10) for future in told] == [0, 1, 2], "the others are written"
        store.close_tiers()
        return
    with pytest.raises(RuntimeError, match="has gone"):
        store.close_tiers()
    assert [future.result(timeout=10) for future in told] == [0, 0, 0]
    wipe(tmp_path / "s")


def test_pages_wait_for_no_disk(tmp_path):
    """A sequence that needs pages which wait to be written gets them: they are copied first."""
    store = make(tmp_path / "s", num_pages=12)
    for seed in range(5):
        prompt = tokens(44, seed)
        sequence = store.open(prompt, 45)
        assert sequence is not None
        model.prefill(store, sequence)
        store.close(sequence)
        assert store.lower.is_behind
    flush(store)
    store.close_tiers()
    store = make(tmp_path / "s", num_pages=12)
    for seed in range(5):
        assert run(store, tokens(44, seed)) == 40


class Slow(NoSync):
    """Writes nothing until it is let."""

    def __init__(self):
        self.let, self.began = Event(), Event()

    def write(self, fd, data):
        self.began.set()
        assert self.let.wait(60)
        return super().write(fd, data)


def test_a_slow_disk_holds_nobody_up(tmp_path):
    """Whole requests begin and end while it stands still, and what waits is told."""
    files = Slow()
    store = make(tmp_path / "s", files=files, num_pages=40)
    for seed in range(3):
        sequence = store.open(tokens(41, seed), 43)
        model.prefill(store, sequence)
        for token in (7, 8):
            model.run_step(store, [(sequence, [token])])
            store.lower.advance(1 << 20)
        store.close(sequence)
        store.lower.advance(1 << 20)
    assert files.began.wait(60) and not files.let.is_set()
    assert store.lower.is_behind and store.lower.held["backlog_bytes"] > 0
    assert store.lower.disk.usage()["records"] == 0
    files.let.set()
    flush(store)
    assert store.lower.held["backlog_bytes"] == 0
    store.close_tiers()
    store = make(tmp_path / "s", num_pages=40)
    assert [run(store, tokens(41, seed)) for seed in range(3)] == [40, 40, 40]


def test_snapshots_given_up_before_they_are_copied(tmp_path):
    """What waits to be written may lose its snapshots to others: then they are not written, never another's."""
    prompts = [tokens(41, 1), tokens(41, 2)]
    store = make(tmp_path / "s", "hybrid", num_pages=40, snapshots=3)
    for prompt in prompts:
        sequence = store.open(prompt, 42, [12, 24, 36])
        model.prefill(store, sequence)
        store.close(sequence)
    assert len(store.lower._jobs) == 2 and store.stats.thinned_entries + store.stats.evicted_entries > 0
    flush(store)
    store.close_tiers()
    store = make(tmp_path / "s", "hybrid", num_pages=40)
    for prompt in prompts:
        run(store, prompt)
        run(store, prompt[:25])
    assert store.lower.counters["hits_disk"] >= 1


def talk(store: KVStore, num_turns: int, seed: int = 0, said=()) -> list[int]:
    """A chat of turns of 8 tokens, each a prompt that goes on from the last."""
    said = list(said)
    for turn in range(num_turns):
        said += tokens(4, seed=seed + turn)
        sequence = store.open(said, len(said) + 4, [len(said)])
        model.prefill(store, sequence)
        model.run_step(store, [(sequence, answer := tokens(4, seed=seed - turn))])
        store.close(sequence)
        store.lower.flush()
        said += answer
    return said


def states_on_disk(store: KVStore) -> list[int]:
    return sorted(stop for (stop,) in store.lower.disk.query("SELECT stop FROM records WHERE kind = 'state'"))


def test_states_on_disk_thin_with_what_was_read_since(tmp_path):
    """Whoever leaves the chat anywhere reads an eighth of the way back more than from the last boundary, at most."""
    store = make(tmp_path / "s", "hybrid", num_pages=200, snapshots=100)
    said = talk(store, 50)
    held = states_on_disk(store)
    assert 16 < len(held) < 40 and held[-1] == 400 and store.lower.disk.counters["thinned_states"] > 20
    assert store.stats.snapshots > len(held), "the device keeps what it has room for"
    assert len(list((tmp_path / "s").glob("models/*/*"))) == store.lower.disk.usage()["records"]
    written = store.lower.disk.counters["written_records"]
    talk(store, 1, seed=99, said=said)
    assert store.lower.disk.counters["written_records"] - written < 5, (
        "what has been thinned is not written again"
    )
    store.close_tiers()
    for cut in range(30, 400, 61):
        store = make(tmp_path / "s", "hybrid", num_pages=200, snapshots=100)
        reused = run(store, [*said[:cut], 999, 999], keep=False)
        assert cut - 8 - (400 - cut) // 8 <= reused <= cut
        store.close_tiers()


def test_ends_forks_documents_and_pins_stay(tmp_path):
    store = make(tmp_path / "s", "hybrid", num_pages=400, snapshots=100)
    disk = store.lower.disk
    start = talk(store, 3)
    run(store, start := [*start, *tokens(4, 50)], label="a document")
    run(store, [*start, *tokens(4, 51)], label="pinned")
    disk.set_pinned(next(p for p in disk.prefixes() if p.label == "pinned"), True)
    for seed in (60, 70):  # the second makes a snapshot where it leaves the first
        run(store, [*start[:14], *tokens(12, seed)])
    end = talk(store, 45, seed=100, said=start)
    held = set(states_on_disk(store))
    assert {8, 12, 16, 24, 28} <= held, "of the pinned one, which goes on from them"
    disk.set_pinned(next(p for p in disk.prefixes() if p.pinned), False)
    talk(store, 1, seed=200, said=end)
    held = set(states_on_disk(store))
    assert {12, 28, 32} <= held and not {8, 16} & held, "a fork, a document's end, another's end"
    assert disk.counters["thinned_states"] > 20
    store.close_tiers()
    store = make(tmp_path / "s", "hybrid", num_pages=400, snapshots=100)
    assert run(store, [*start, *tokens(4, 51), 7], keep=False) == 32
    assert run(store, [*start[:14], 5, 5, 5], keep=False) == 12
    assert run(store, [*end, 5], keep=False) >= len(end) - 4


def test_a_documents_end_stays_where_a_chat_leaves_it_within_a_page(tmp_path):
    """Another version of it, say: what of a document fills no page is in no chain."""
    store = make(tmp_path / "s", "hybrid", num_pages=400, snapshots=100)
    disk, model_number = store.lower.disk, store.lower.model
    start = talk(store, 3)
    root, ids = disk.prefixes()[0].root, encode_tokens([*start[:16], 999, 999])
    add_document(disk, model_number, NewDocument(root, b"o" * 32, "hut", "text", (), ids))
    talk(store, 45, seed=100, said=start)
    held = set(states_on_disk(store))
    assert 16 in held and not {8, 24} & held
    store.close_tiers()


def test_old_prefixes_lose_more_states_before_anything_goes_whole(tmp_path, monkeypatch):
    store = make(tmp_path / "s", "hybrid", num_pages=400, snapshots=100)
    disk = store.lower.disk
    chats = [talk(store, 40, seed) for seed in (1000, 2000)]
    before = disk.usage()["records"], len(states_on_disk(store))
    monkeypatch.setattr(disk, "_index_bytes", lambda: 0)
    disk._evict_to(disk._held() - 1)
    after = disk.usage()["records"], len(states_on_disk(store))
    assert before[0] - after[0] == before[1] - after[1] > 5, "states alone"
    assert disk.counters["evicted_records"] == 0
    disk._evict_to(disk._held() - 1)
    assert disk.counters["evicted_records"] == 1, "once each: then the least recently used goes"
    store.close_tiers()
    for cut, chat in [(100, chats[0]), (100, chats[1])]:
        store = make(tmp_path / "s", "hybrid", num_pages=400, snapshots=100)
        distance = 320 - cut
        reused = run(store, [*chat[:cut], 999], keep=False)
        assert reused >= cut - 8 - (distance if chat is chats[0] else distance // 8)
        store.close_tiers()


def test_states_in_host_memory_thin(tmp_path):
    store = make(None, "hybrid", ram=8 * MIB, num_pages=200, snapshots=100)
    said = talk(store, 50)
    had = store.stats.snapshots
    while store._evict_leaf():
        pass
    held = len(store.lower.ram._states)
    assert 16 < held < 40 < had and store.lower.counters["thinned_ram_states"] == had - held
    for cut in range(30, 400, 61):
        reused = run(store, [*said[:cut], 999, 999], keep=False)
        assert cut - 8 - (400 - cut) // 8 <= reused <= cut
        while store._evict_leaf():
            pass


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_walk_over_all_tiers(tmp_path, kind, seed):
    """Random prompts that go on from and leave earlier ones, restarts, damage: never a wrong byte."""
    random = Random(seed)
    folder = tmp_path / "s"
    sizes = {"num_pages": random.choice([10, 16]), "snapshots": random.choice([2, 4]), "ram": 60_000}
    store, prompts, reused, restarts = make(folder, kind, **sizes), [[0]], 0, 0
    for _ in range(120):
        earlier = random.choice(prompts)
        prompt = earlier[: random.randrange(len(earlier) + 1)] + random.choices(
            [0, 1], k=random.randint(1, 8)
        )
        prompt = prompt[:30]
        marks = random.sample(range(1, len(prompt) + 1), k=random.randrange(2))
        answer = random.choices([0, 1], k=random.randrange(6))
        sequence = store.open(prompt, len(prompt) + len(answer), marks, keep=random.random() < 0.95)
        model.prefill(store, sequence, random.choice([100, 5, 1]))
        for token in answer:
            model.run_step(store, [(sequence, [token])])
            store.lower.advance(random.choice([0, 1 << 20]))
        store.close(sequence, keep=random.random() < 0.95)
        prompts = [*prompts[-10:], sequence.token_ids]
        reused += sequence.cached_len
        flush(store)
        if random.random() < 0.1:
            store.close_tiers()
            restarts += 1
            if random.random() < 0.4:
                path = random.choice([*folder.glob("models/*/*"), None])
                if path is not None:
                    data = bytearray(path.read_bytes())
                    data[random.randrange(len(data))] ^= 16
                    path.write_bytes(data)
            store = make(folder, kind, **sizes)
    assert reused > 400 and restarts > 3
    store.close_tiers()
    model.check_all_free(store)
