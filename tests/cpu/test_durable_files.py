"""The disk tier by itself: what is durable, what is never believed, what every fault comes to."""

import contextlib
import errno
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from threading import Event, Thread

import psutil
import pytest

import durable_files as numbers
from packhorse.core.errors import RefusedError, UsageError
from packhorse.core.units import MIB
from packhorse.store import durable
from packhorse.store.durable import DurableStore
from packhorse.store.files import ENDED, STEPS, Faults, FileSystem
from packhorse.store.index import LAYOUT
from packhorse.store.records import Image, RamRecords, UnreadableError


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "models").glob("*/*"))


def check_found(store: DurableStore, number: int, size: int = 5000) -> None:
    record = numbers.find(store, number)
    assert record is not None, f"{number} is lost"
    assert bytes(store.read(record).view) == bytes(numbers.image(number, size).view)


def check_consistent(store: DurableStore) -> None:
    """Every row has its file, whole; every file its row."""
    assert list(store.verify()) == []
    assert len(files_of(store.folder)) == store.usage()["records"]


def test_an_image_is_a_safetensors_file(tmp_path):
    from safetensors.numpy import load_file

    image = numbers.image(0)
    path = tmp_path / "x.safetensors"
    path.write_bytes(image.view)
    tensors = load_file(path)
    assert tensors["layers.1"].tobytes() == numbers.content(0, 1, 5000)
    assert tensors["token_ids"].tobytes() == image.record.tokens
    assert int.from_bytes(path.read_bytes()[:8], "little") % 4096 == 4096 - 8
    parsed = Image.parse(image.buffer, image.record.num_bytes)
    assert parsed.record == image.record and bytes(parsed.parts["layers.0"]) == bytes(image.parts["layers.0"])


def test_what_is_written_is_there_for_the_next_process(tmp_path):
    store, model = numbers.open_store(tmp_path / "s")
    assert store.write(model, [numbers.image(n) for n in range(6)])
    store.close()
    store, again = numbers.open_store(tmp_path / "s")
    assert again == model and store.secret == (tmp_path / "s" / "secret").read_bytes()
    for n in range(6):
        check_found(store, n)
    assert numbers.find(store, 6) is None
    assert store.write(model, [numbers.image(n) for n in range(7)]), "what is there is left alone"
    assert store.counters["written_records"] == 1
    assert store.direct is not None, "which way was read is known"
    check_consistent(store)


def test_nobody_else_may_read_it(tmp_path):
    store, model = numbers.open_store(tmp_path / "s")
    store.write(model, [numbers.image(0)])
    for path in [store.folder, *store.folder.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    store.close()


@pytest.mark.parametrize("fault", ["flip", "short", "error"])
def test_faults_of_a_read(tmp_path, fault):
    files = Faults()
    store, model = numbers.open_store(tmp_path / "s", files=files)
    store.write(model, [numbers.image(0)])
    if fault == "short":
        files.short = True
        check_found(store, 0)  # a read that is cut is gone on with
        return
    files.flip, files.errors = (9000, {}) if fault == "flip" else (None, {"read": errno.EIO})
    with pytest.raises(UnreadableError) as caught:
        store.read(numbers.find(store, 0))
    assert caught.value.reason == ("checksum" if fault == "flip" else "io_error")
    files.flip, files.errors = None, {}
    check_found(store, 0)


@pytest.mark.parametrize(
    ("what", "code"), [("write", errno.ENOSPC), ("write", errno.EIO), ("fsync", errno.EIO)]
)
def test_faults_of_a_write_leave_nothing_behind(tmp_path, what, code):
    files = Faults()
    store, model = numbers.open_store(tmp_path / "s", files=files)
    store.write(model, [numbers.image(0)])
    files.errors = {what: code}
    assert not store.write(model, [numbers.image(1), numbers.image(2)])
    assert os.strerror(code) in store.trouble and store.counters["write_failures"] == 1
    assert numbers.find(store, 1) is None and numbers.find(store, 2) is None
    check_consistent(store)
    files.errors, files.short = {}, True
    assert store.write(model, [numbers.image(1)]) and store.trouble == ""
    files.short = False
    check_found(store, 1)


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_ends_at_any_step(tmp_path, step):
    folder = tmp_path / "s"
    store, model = numbers.open_store(folder)
    assert store.write(model, [numbers.image(n) for n in range(3)])
    store.close()
    process = subprocess.run([sys.executable, numbers.__file__, folder, step], check=False)
    assert process.returncode == ENDED, "the step was not reached"
    store, _ = numbers.open_store(folder)
    check_consistent(store)
    durable_then = STEPS.index(step) >= STEPS.index("committed")
    for n in (1, 2):
        check_found(store, n)
    for n in (3, 4):
        assert (numbers.find(store, n) is not None) is durable_then
    assert (numbers.find(store, 0) is None) is step.endswith(" deleted")
    assert store.write(model, [numbers.image(n) for n in range(5)])
    for n in range(5):
        check_found(store, n)


def test_what_is_said_to_be_durable_was_synced_before(tmp_path):
    """The file before it gets its name, the folder before the row."""

    class Noting(FileSystem):
        def __init__(self):
            self.events = []

        def reached(self, step):
            self.events.append(step)

        def fsync(self, fd):
            self.events.append("sync " + ("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file"))

    files = Noting()
    store, model = numbers.open_store(tmp_path / "s", files=files)
    files.events.clear()
    assert store.write(model, [numbers.image(0)])
    steps = "opened, written, sync file, synced, renamed, sync folder, folder synced, committed"
    assert files.events == steps.split(", ")
    assert store._writer.execute("PRAGMA synchronous").fetchone() == (2,), "commits are synced too"


def kill_at_random(folder: Path, times: int, seed: int) -> None:
    """Kill a writing process again and again: what it has said is durable is, and nothing else is left."""
    random, said, opened = Random(seed), set(), []
    for _ in range(times):
        writer = Path(numbers.__file__)
        first = max(said, default=-1) + 1
        command = [sys.executable, str(writer), str(folder), str(first)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        time.sleep(random.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        lines = [line, *process.stdout.read().splitlines()]
        process.wait()
        said |= {int(text) for text in lines if text.strip()}
        began = time.monotonic()
        store, _ = numbers.open_store(folder)
        opened.append(time.monotonic() - began)
        check_consistent(store)
        for number in said:
            assert numbers.find(store, number) is not None, f"{number} is lost"
        for number in random.sample(sorted(said), min(5, len(said))):
            check_found(store, number)
        store.close()
    assert len(said) >= times
    assert sorted(opened)[times // 2] < 1  # the machine may be busy with others for a while


def test_killed_at_random(tmp_path):
    kill_at_random(tmp_path / "s", 50, seed=1)


@pytest.mark.slow
def test_killed_a_thousand_times(tmp_path):
    for seed in range(20):
        kill_at_random(tmp_path / str(seed), 50, seed)


def damage(path: Path, others: list[bytes], random: Random) -> None:
    """One random flip, cut, growth, exchange or loss."""
    data = bytearray(path.read_bytes())
    kind = random.randrange(6)
    if kind == 0 and data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == 1:
        del data[random.randrange(len(data)) :]
    elif kind == 2:
        data += bytes(random.randrange(1, 5000))
    elif kind == 3:
        data[:] = random.choice(others)
    elif kind == 4:
        at = random.randrange(len(data))
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    else:
        path.unlink()
        return
    path.write_bytes(data)


def test_damaged_files_are_never_believed(tmp_path):
    """2,000 files, half of them damaged: each is read right or not at all, and verify names each."""
    random = Random(3)
    store, model = numbers.open_store(tmp_path / "s")
    for first in range(0, 2000, 250):
        assert store.write(model, [numbers.image(n, 700) for n in range(first, first + 250)])
    paths = files_of(store.folder)
    before = {path: path.read_bytes() for path in paths}
    whole = list(before.values())
    for path in random.sample(paths, 1000):
        damage(path, whole, random)
    damaged = {path for path in paths if not path.exists() or path.read_bytes() != before[path]}
    assert len(damaged) > 900
    assert {path for path, _ in store.verify()} == damaged
    lost = 0
    for n in range(2000):
        record = numbers.find(store, n)
        try:
            image = store.read(record)
        except UnreadableError as error:
            assert error.reason in ("size", "checksum", "missing", "truncated", "header", "other_record")
            store.mark_gone(record)
            store.drop(record)
            assert numbers.find(store, n) is None
            lost += 1
        else:
            assert bytes(image.view) == bytes(numbers.image(n, 700).view)
    assert lost == len(damaged)
    check_consistent(store)


def test_what_is_damaged_is_replaced_when_it_comes_again(tmp_path):
    """Also where nobody has tried to read it; what a disk does not read for a moment stays."""
    files = Faults()
    store, model = numbers.open_store(tmp_path / "s", files=files)
    images = [numbers.image(n) for n in range(6)]
    assert store.write(model, images)
    for path in files_of(store.folder)[:3]:
        path.write_bytes(path.read_bytes()[:-1])
    files.errors = {"read": errno.EIO}
    assert store.write(model, images) and store.counters["replaced_records"] == 3, (
        "of these the size was wrong"
    )
    files.errors = {}
    assert store.write(model, images) and store.counters["replaced_records"] == 3
    for n in range(6):
        check_found(store, n)
    check_consistent(store)
    assert store.counters["written_records"] == 9


def test_what_is_read_again_after_damage_is_offered(tmp_path):
    """The last row's number is the next one's too."""
    store, model = numbers.open_store(tmp_path / "s")
    assert store.write(model, [numbers.image(n) for n in range(3)])
    store.mark_gone(record := numbers.find(store, 2))
    assert numbers.find(store, 2) is None
    store.drop(record)
    assert store.write(model, [numbers.image(2)])
    assert numbers.find(store, 2).id == record.id
    check_found(store, 2)


def test_what_could_not_be_read_for_a_while_is_offered_again(tmp_path):
    """Nothing is written anew: its file is whole after all."""
    store, model = numbers.open_store(tmp_path / "s")
    assert store.write(model, [numbers.image(0)])
    store.mark_gone(numbers.find(store, 0))
    assert numbers.find(store, 0) is None
    assert store.write(model, [numbers.image(0)]) and store.counters["written_records"] == 1
    check_found(store, 0)


def test_a_reader_sees_what_was_written_while_another_reads(tmp_path):
    """A record written, by whomever, while a thread is in the middle of a query."""
    store, model = numbers.open_store(tmp_path / "s")
    assert store.write(model, [numbers.image(n) for n in range(3)])
    inside, go, found = Event(), Event(), []

    def row_of(_, row):
        if not inside.is_set():
            inside.set()
            go.wait(10)
        return row

    store._reader.row_factory = row_of
    first = Thread(target=store.query, args=("SELECT file FROM records",))
    first.start()
    assert inside.wait(10)
    other, _ = numbers.open_store(tmp_path / "s")
    assert other.write(model, [numbers.image(7)])
    second = Thread(target=lambda: found.append(numbers.find(store, 7)))
    second.start()
    second.join(0.2)  # it ends when it does not wait for the first
    go.set()
    first.join()
    second.join()
    assert found[0] is not None
    other.close()


def test_files_exchanged_with_their_checksums(tmp_path):
    """A row that points to another record's whole and valid file."""
    store, model = numbers.open_store(tmp_path / "s")
    store.write(model, [numbers.image(0), numbers.image(1)])
    index = sqlite3.connect(store.folder / "index.sqlite")
    rows = dict(index.execute("SELECT id, file || ' ' || crc FROM records").fetchall())
    index.execute("UPDATE records SET file = 'x' || id")
    for number, other in zip(rows, reversed(rows.values()), strict=True):
        index.execute("UPDATE records SET file = ?, crc = ? WHERE id = ?", (*other.split(), number))
    index.commit()
    index.close()
    for n in (0, 1):
        with pytest.raises(UnreadableError, match="other_record"):
            store.read(numbers.find(store, n))


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_index(tmp_path, seed):
    """Emptied or served: never a wrong record, never a crash; and usable afterwards."""
    random = Random(seed)
    folder = tmp_path / "s"
    store = DurableStore(folder, quota=64 * MIB, reserve=0)
    model = store.add_model(numbers.MODEL, {"name": "numbers", "page_len": "4"})
    store.write(model, [numbers.image(n) for n in range(60)])
    for n in range(0, 60, 3):
        parent, tokens = numbers.key(n, "parent"), numbers.image(n).record.tokens
        store.note_prefix(model, parent, numbers.key(n, "prefix"), tokens, "x")
    with store.transaction() as write:
        write.execute("UPDATE prefixes SET lifetime = -1 WHERE id % 2 = 0")  # over: a start removes these
    store.close()
    path = folder / "index.sqlite"
    data = bytearray(path.read_bytes())
    if seed == 0:
        data[:100] = os.urandom(100)
    elif seed == 1:
        del data[len(data) // 2 :]
    else:
        for _ in range(seed * 4):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    try:
        store, model = numbers.open_store(folder)
    except RefusedError:
        return
    for n in range(60):
        record = numbers.find(store, n)
        if record is not None:
            with contextlib.suppress(UnreadableError):
                assert bytes(store.read(record).view) == bytes(numbers.image(n).view)
    store.close()


def test_the_quota_holds_and_the_oldest_goes_first(tmp_path):
    store, model = numbers.open_store(tmp_path / "s", quota=16 * MIB)
    size = 256 * 1024
    for n in range(0, 300, 3):
        assert store.write(model, [numbers.image(n, size)])
        store.touch([numbers.find(store, 0)])
        used = sum(path.stat().st_blocks * 512 for path in store.folder.rglob("*") if path.is_file())
        assert used <= 16 * MIB * 1.01
    check_consistent(store)
    check_found(store, 0, size)
    assert numbers.find(store, 3) is None and numbers.find(store, 297) is not None
    assert store.counters["evicted_records"] > 60


def test_who_has_found_what_goes_meanwhile(tmp_path):
    """Learns that it has gone, unless its file alone has; and lets be what has its number by then."""
    store, model = numbers.open_store(tmp_path / "s")
    assert store.write(model, [numbers.image(0)])
    found = numbers.find(store, 0)
    store.drop(found)
    assert store.write(model, [numbers.image(1)]) and numbers.find(store, 1).id == found.id
    with pytest.raises(UnreadableError) as caught:
        store.read(found)
    assert caught.value.reason == "gone"
    store.drop(found)
    check_found(store, 1)
    files_of(tmp_path / "s")[0].unlink()
    with pytest.raises(UnreadableError) as caught:
        store.read(numbers.find(store, 1))
    assert caught.value.reason == "missing"


def test_room_is_made_where_prefixes_cannot_be_read(tmp_path):
    """Which states old ones can do without is not known then."""
    store, model = numbers.open_store(tmp_path / "s", quota=16 * MIB)
    for table in ("documents", "prefixes"):
        store._writer.execute(f"DROP TABLE {table}")
    for n in range(0, 180, 3):
        assert store.write(model, [numbers.image(n, 300_000)]), store.trouble
    assert store.counters["evicted_records"] > 5 and store.counters["index_errors"] > 5
    check_found(store, 177, 300_000)


def test_more_than_the_quota_is_refused_whole(tmp_path):
    store, model = numbers.open_store(tmp_path / "s", quota=16 * MIB)
    store.write(model, [numbers.image(0)])
    assert not store.write(model, [numbers.image(3, 9 * MIB)])
    assert store.counters["refused_for_room"] == 1 and "the quota has no room for 18" in store.trouble
    check_found(store, 0)


@pytest.mark.parametrize("reserve", [0, durable.RESERVE])
def test_a_full_disk(tmp_path, reserve):
    """What is stored makes way; where that is not enough, nothing is written. What is to stay free does."""
    files = Faults()
    store, model = numbers.open_store(tmp_path / "s", files=files)
    store.reserve = reserve
    store.write(model, [numbers.image(n, 100_000) for n in range(0, 30, 3)])
    free = reserve + 50_000
    files.free_bytes = lambda _: free
    assert store.write(model, [numbers.image(30, 100_000)]) and store.counters["evicted_records"] == 1
    free = reserve - 10**9
    assert not store.write(model, [numbers.image(33, 100_000)])
    assert store.counters["refused_for_room"] == 1 and "the disk has no room for 20" in store.trouble
    check_found(store, 30, 100_000)


def test_a_clock_that_goes_back(tmp_path):
    files = Faults()
    store, model = numbers.open_store(tmp_path / "s", quota=16 * MIB, files=files)
    for n in range(0, 180, 3):
        files.clock -= 1000
        assert store.write(model, [numbers.image(n, 256 * 1024)])
        store.note_prefix(model, b"r" * 32, numbers.key(n), b"%04d" % n, "x")
    assert numbers.find(store, 177) is not None and numbers.find(store, 0) is None


def test_a_file_system_without_direct_reads(tmp_path, monkeypatch):
    """Files are read through the page cache then, and that is known."""
    store, model = numbers.open_store(tmp_path / "s")
    store.write(model, [numbers.image(0), numbers.image(1)])
    true_open, tried = os.open, []

    def refuse(path, flags, *args, **options):
        if flags & os.O_DIRECT:
            tried.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return true_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    for number in (0, 1):
        check_found(store, number)
    assert len(tried) == 1 and store.direct is False


def test_no_lock_is_held_over_files_and_readers_do_not_wait(tmp_path):
    """While files are written, synced and read somebody else may change the index; while it is changed it is read."""

    class Looking(FileSystem):
        def __init__(self):
            self.other, self.seen = None, set()

        def look(self, what):
            if self.other is not None:
                self.seen.add(what)
                with self.other.transaction() as write:
                    write.execute("UPDATE records SET used = used")

        def write(self, fd, data):
            self.look("write")
            return super().write(fd, data)

        def fsync(self, fd):
            self.look("fsync")
            super().fsync(fd)

        def read(self, fd, buffer, offset):
            self.look("read")
            return super().read(fd, buffer, offset)

        def reached(self, step):
            self.look(step)

    files = Looking()
    store, model = numbers.open_store(tmp_path / "s", files=files)
    other, _ = numbers.open_store(tmp_path / "s")
    for each in (store, other):
        for connection in (each._reader, each._writer):
            connection.execute("PRAGMA busy_timeout = 0")  # whoever would wait fails
    files.other = other
    assert store.write(model, [numbers.image(n) for n in (0, 1, 3)]), store.trouble
    check_found(store, 0)
    store.drop(numbers.find(store, 3))
    assert files.seen == {"write", "fsync", "read", *STEPS} and store.trouble == ""
    files.other = None
    with other.transaction() as write:
        write.execute("DELETE FROM records")
        for reader in (store, other):
            check_found(reader, 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_as_a_user(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir(mode=0o500)
    with pytest.raises(RefusedError, match="Permission denied"):
        numbers.open_store(folder)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RefusedError, match="Read-only file system"):
        numbers.open_store(tmp_path / "s")


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(durable.fcntl, "flock", refuse)
    with pytest.raises(RefusedError, match="No locks available"):
        numbers.open_store(tmp_path / "s")


def test_a_file_system_without_shared_memory(tmp_path, monkeypatch):
    """SQLite's log of writes needs it; the way of locking that it is told here has none."""

    def connect(path, **options):
        return true_connect(f"file:{path}?vfs=unix-dotfile", uri=True, **options)

    true_connect = sqlite3.connect
    monkeypatch.setattr(durable.sqlite3, "connect", connect)
    with pytest.raises(RefusedError, match="cannot share memory between processes") as caught:
        numbers.open_store(tmp_path / "s")
    assert "local disk" in caught.value.hint


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "letter.txt").write_text("x")
    with pytest.raises(UsageError, match=r"letter\.txt and is no store"):
        numbers.open_store(tmp_path)
    with pytest.raises(UsageError, match="is no store"):
        durable.wipe(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    with pytest.raises(UsageError, match="is the least"):
        numbers.open_store(tmp_path / "s", quota=1)


@pytest.mark.parametrize(("layout", "served"), [(LAYOUT - 1, True), (LAYOUT + 1, False)])
def test_another_layout(tmp_path, layout, served):
    store, model = numbers.open_store(tmp_path / "s")
    store.write(model, [numbers.image(0)])
    store._writer.execute("UPDATE meta SET layout = ?", (layout,))
    if served:
        with pytest.raises(RefusedError, match="another process uses it"):
            numbers.open_store(tmp_path / "s")
    store.close()
    if not served:
        with pytest.raises(RefusedError, match=f"of layout {LAYOUT + 1}, and this is {LAYOUT}"):
            numbers.open_store(tmp_path / "s")
        return
    store, model = numbers.open_store(tmp_path / "s")
    assert store.counters["emptied"] == 1 and files_of(store.folder) == []
    assert store.write(model, [numbers.image(0)])
    check_found(store, 0)


def test_two_processes_share(tmp_path):
    folder = tmp_path / "s"
    store, model = numbers.open_store(folder)
    command = [sys.executable, numbers.__file__, str(folder), "3000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        for n in range(30):
            assert store.write(model, [numbers.image(n)]), store.trouble
            said = int(other.stdout.readline())
            check_found(store, said)
        other.kill()
    for n in range(30):
        check_found(store, n)
    with pytest.raises(RefusedError, match="uses the store"):
        durable.wipe(folder)
    store.close()
    durable.wipe(folder)
    assert not folder.exists()


def caps_hold(folder: Path, operations: int, cap: int, slack: int = 0) -> None:
    """RAM and disk as the system counts them, over random puts, uses and losses: a hundredth above the cap at most.
    slack: bytes of memory beside, of Python's own, where these are more than a hundredth."""
    random, process = Random(5), psutil.Process()
    store, model = numbers.open_store(folder, quota=cap)
    store._writer.execute("PRAGMA synchronous = OFF")
    ram = RamRecords(cap)
    for n in (0, 1, 2):  # what making and writing images takes besides is there before we count
        assert store.write(model, [numbers.image(n, 2_000_000)])
    gc.collect()
    start = process.memory_info().rss
    most = 0
    for n in range(operations):
        size = random.choice([1000, 30_000, 400_000, 2_000_000])
        image = numbers.image(random.randrange(max(500, operations // 5)), size)
        if random.random() < 0.3:
            assert store.write(model, [image]), store.trouble
        elif not ram.has(image.record):
            ram.put(image)
        else:
            ram.drop(image.record)
        del image
        if n % 20 == 0:
            most = max(most, process.memory_info().rss - start)
            assert most <= cap * 1.01 + slack, f"{(most - cap) / MIB:.2f} MiB above"
            used = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
            assert used <= cap * 1.01
    assert most > 0.7 * cap and store.counters["evicted_records"] > 0 and ram.evicted > 0
    ram.clear()
    gc.collect()
    assert process.memory_info().rss - start < 6 * MIB
    check_consistent(store)


def test_caps_hold(tmp_path):
    caps_hold(tmp_path / "s", 400, 48 * MIB, slack=2 * MIB)


@pytest.mark.slow
def test_caps_hold_for_ten_thousand_operations(tmp_path):
    caps_hold(tmp_path / "s", 10_000, 512 * MIB)


def test_ram_keeps_to_its_size():
    ram = RamRecords(200_000)
    for n in range(60):
        assert ram.put(numbers.image(n))
        assert ram.used <= ram.capacity
    assert 5 < len(ram) < 20 and ram.evicted == 60 - len(ram)
    assert not ram.put(numbers.image(0, 300_000))
    ram.drop(numbers.image(59, 100).record)  # of another size than what is held
    assert ram.used == sum(ram._cost(i.record.num_bytes) for i in ram._images.values())
    ram.clear()
    assert (len(ram), ram.used, ram._by_parent, ram._states) == (0, 0, {}, {})


DAY = 86400.0


def aged(folder: Path, files: Faults, max_age: float | None = 10 * DAY) -> DurableStore:
    return DurableStore(folder, quota=64 * MIB, reserve=0, max_age=max_age, files=files)


def test_what_is_too_old_is_deleted(tmp_path):
    files = Faults()
    store = aged(tmp_path / "s", files)
    model = store.add_model(numbers.MODEL, {"name": "numbers", "page_len": "4"})
    for number, day in ((0, 0), (1, 5), (3, 9)):
        files.clock = 1e9 + day * DAY
        assert store.write(model, [numbers.image(number)])
        store.note_prefix(model, numbers.key(number, "parent"), numbers.key(number), b"1234" * 4, "x")
    store.touch([numbers.image(0).record])
    store.expire()
    check_found(store, 0)
    files.clock = 1e9 + 10.5 * DAY
    store.expire()
    assert numbers.find(store, 0) is None and len(store.prefixes()) == 2, "used or not"
    check_found(store, 1)
    assert store.counters["expired_records"] == 1
    store.close()
    files.clock = 1e9 + 15.5 * DAY
    aged(tmp_path / "s", files, None).close()
    store = aged(tmp_path / "s", files)
    assert numbers.find(store, 1) is None, "a start looks too"
    check_found(store, 3)
    check_consistent(store)
    store.set_pinned(store.prefixes()[0], True)
    files.clock = 1e9 + 40 * DAY
    store.expire()
    assert files_of(store.folder) == [] and store.prefixes() == [], "a pin is for room, not for time"


def test_ages_when_the_clock_goes_back(tmp_path):
    """What was written in the future counts from now on: it is kept no longer than the limit, and no less."""
    files = Faults()
    store = aged(tmp_path / "s", files)
    model = store.add_model(numbers.MODEL, {"name": "numbers", "page_len": "4"})
    files.clock = 1e9 + 1000 * DAY
    assert store.write(model, [numbers.image(0)])
    files.clock = 1e9
    store.expire()
    files.clock = 1e9 + 9 * DAY
    store.expire()
    check_found(store, 0)
    files.clock = 1e9 + 11 * DAY
    store.expire()
    assert numbers.find(store, 0) is None


def test_an_expiry_that_fails_is_trouble_and_tried_again(tmp_path, monkeypatch):
    files = Faults()
    store = aged(tmp_path / "s", files)
    model = store.add_model(numbers.MODEL, {"name": "numbers"})
    assert store.write(model, [numbers.image(0)])
    files.clock += 11 * DAY
    with monkeypatch.context() as patch:
        patch.setattr(store, "_delete", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "x")))
        store.expire()
    assert "expiry failed" in store.trouble and len(files_of(store.folder)) == 1
    store.expire()
    assert files_of(store.folder) == []


def test_long_values_come_last_in_their_rows(tmp_path):
    """What stands behind one is read through all its pages: 300 prefixes of a MB made a start take 1.5 s so."""
    store, _ = numbers.open_store(tmp_path / "s")
    for table, long in (("records", {"tokens"}), ("prefixes", {"tokens"}), ("documents", {"text", "pages"})):
        columns = [row[1] for row in store.query(f"PRAGMA table_info({table})")]
        assert set(columns[-len(long) :]) == long
