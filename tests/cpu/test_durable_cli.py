"""packhorse ask --store, again in another engine; packhorse cache."""

import errno
import io
import json
import os
import re
import shutil
import sqlite3
import zlib
from array import array
from pathlib import Path

import pytest

from chats import PLAIN, byte_tokenizer, shared_folder
from packhorse.cli import asking
from packhorse.cli import main as cli
from packhorse.core.errors import RefusedError
from packhorse.store import files
from packhorse.store.durable import DurableStore

FIXED = ("--threads", "1", "--context", "2048", "--exact", "--max-tokens", "4")
QUESTION = "How many mules?"


@pytest.fixture
def hut(tmp_path) -> Path:
    path = tmp_path / "hut.txt"
    path.write_text("The hut has nine mules and one warden. " * 24)
    return path


def ask(
    store: Path, document: Path, *args: object, family: str = "qwen3_5", model: Path | None = None
) -> int:
    model = model or shared_folder(family, PLAIN)
    return cli.run(
        ["ask", str(model), *FIXED, "--store", str(store), "--document", str(document), *map(str, args)]
    )


def figures(capsys) -> tuple[int, int, str]:
    """Tokens read and reused, and the answer."""
    captured = capsys.readouterr()
    found = re.fullmatch(r"read (\d+) tokens, reused (\d+), .*", captured.err.splitlines()[-1])
    return int(found[1]), int(found[2]), captured.out


def cache(capsys, *args: object) -> dict:
    assert cli.run(["cache", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_ask_again_reads_nothing_again(tmp_path, capsys, hut, family):
    store = tmp_path / "s"
    assert ask(store, hut, QUESTION, family=family) == 0
    read, reused, answer = figures(capsys)
    assert (read > 900, reused) == (True, 0)
    assert ask(store, hut, QUESTION, family=family) == 0
    assert figures(capsys) == (read, (read - 1) // 64 * 64, answer)
    assert ask(store, hut, "Who is the warden of it?", family=family) == 0
    _, reused, other = figures(capsys)
    assert reused >= read - 128
    shutil.rmtree(store)
    assert ask(store, hut, "Who is the warden of it?", family=family) == 0
    assert figures(capsys)[2] == other, "what was restored changes no answer"


@pytest.mark.parametrize("when", ["_progress", "_text"])
def test_what_ctrl_c_interrupts_is_kept(tmp_path, capsys, hut, monkeypatch, when):
    """While the document is read, and in the answer: whole pages are kept, and that is said."""
    store, answered = tmp_path / "s", getattr(asking.Display, when)

    def pressed(self, *args):
        answered(self, *args)
        if when == "_text" or 256 <= args[0] < args[1]:
            raise KeyboardInterrupt

    monkeypatch.setattr(asking.Display, when, pressed)
    assert ask(store, hut, QUESTION, family="qwen3") == 130
    told = r"Kept of what was read: whole pages, [\d.]+ [KM]iB\.\nInterrupted\.\n"
    assert re.search(told, capsys.readouterr().err)
    if when == "_text":
        assert ask(store, hut, QUESTION, family="qwen3") == 130
        assert "Kept of what was read: nothing new.\n" in capsys.readouterr().err
    monkeypatch.undo()
    assert ask(store, hut, QUESTION, family="qwen3") == 0
    assert figures(capsys)[1] > 900


def test_a_chat_goes_on_from_the_store(tmp_path, capsys, hut, monkeypatch):
    model, store = str(shared_folder("qwen3_5", PLAIN)), tmp_path / "s"
    args = ["chat", model, *FIXED, "--store", str(store), "--document", str(hut), "--json"]
    reused = []
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"How many mules?\nAnd wardens?\n")))
        assert cli.run(args) == 0
        turns = json.loads(capsys.readouterr().out)["turns"]
        reused.append([turn["usage"]["reused_tokens"] for turn in turns])
    assert reused[0][0] == 0 and min(reused[0][1], *reused[1]) > 900
    assert ask(store, hut, QUESTION) == 0
    assert figures(capsys)[1] > 900, "ask finds what chat has read"


def test_a_store_that_was_emptied_says_so(tmp_path, capsys, hut):
    store = tmp_path / "s"
    assert ask(store, hut, QUESTION) == 0
    assert "was emptied" not in capsys.readouterr().err
    assert ask(store, hut, QUESTION) == 0
    assert re.search(r"the store \S+ holds \d+\.\d+ [KM]iB of 64\.00 GiB\n", capsys.readouterr().err)
    (store / "index.sqlite").write_bytes(b"x" * 8192)
    for action in ("ls", "verify"):
        assert cli.run(["cache", action, "--store", str(store)]) == 4
        assert "is damaged: nothing in it can be found" in capsys.readouterr().err
    assert list((store / "models").glob("*/*"))
    assert ask(store, hut, QUESTION) == 0
    captured = capsys.readouterr().err
    assert "holds 0 B of 64.00 GiB, and was emptied" in captured and "reused 0," in captured
    assert ask(store, hut, QUESTION) == 0
    assert figures(capsys)[1] > 900


def test_what_is_damaged_is_read_again_and_told(tmp_path, capsys, hut):
    store = tmp_path / "s"
    assert ask(store, hut, QUESTION) == 0
    _, _, answer = figures(capsys)
    damaged = 0
    for path in (store / "models").glob("*/*"):
        data = bytearray(path.read_bytes())
        if b'"kind":"pages"' in data[:4096]:
            data[-9] ^= 1
            damaged += 1
            path.write_bytes(data)
    assert damaged == 1
    assert ask(store, hut, QUESTION, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["answer"], told["usage"]["reused_tokens"]) == (answer.strip(), 0)
    assert any("could not be used and was read again (checksum " in text for text in told["notes"])
    assert ask(store, hut, QUESTION) == 0
    captured = capsys.readouterr().err
    assert "could not be used" not in captured and "reused 0," not in captured


def test_damage_to_what_was_written_last_is_no_trouble(tmp_path, capsys, hut, monkeypatch):
    """The row that replaces it gets its number: it is said to be damaged, once, and the document is kept."""
    store = tmp_path / "s"
    monkeypatch.setattr("packhorse.store.lower.EXTENT_BYTES", 1 << 18)
    assert ask(store, hut, QUESTION, family="qwen3") == 0
    with sqlite3.connect(store / "index.sqlite") as index:
        [(name,)] = index.execute("SELECT file FROM records ORDER BY id DESC LIMIT 1")
    [path] = store.rglob(f"{name}.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-8] + bytes(b ^ 1 for b in data[-8:]))
    capsys.readouterr()
    for told in (["of what is stored some could not be used and was read again (checksum 1)."], []):
        assert ask(store, hut, QUESTION, "--json", family="qwen3") == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert [n.removeprefix("Warning: ") for n in notes if n.startswith("Warning")] == told


def test_a_quota_too_small_for_a_document_that_is_there(tmp_path, capsys, hut, monkeypatch):
    """What it holds of it stays and is used; it does not go for the rest, and nothing is wrong with the store."""
    store = tmp_path / "s"
    monkeypatch.setattr("packhorse.store.lower.EXTENT_BYTES", 1 << 18)
    monkeypatch.setattr("packhorse.store.durable.MIN_QUOTA", 0)
    assert ask(store, hut, QUESTION, family="qwen3") == 0
    capsys.readouterr()
    reused = []
    for _ in range(2):
        assert ask(store, hut, QUESTION, "--disk", "1.5MiB", "--json", family="qwen3") == 0
        told = json.loads(capsys.readouterr().out)
        document, rest = [note for note in told["notes"] if note.startswith("Warning")]
        assert re.search(
            r"takes 1\.\d+ MiB, and the store has room for 1\.\d+ MiB\. Give the store", document
        )
        assert re.search(
            r"not be kept: the quota has no room for 2\.00 MiB \(--disk gives it more\)\.$", rest
        )
        reused.append(told["usage"]["reused_tokens"])
    assert 256 < reused[0] == reused[1] < 900
    [document] = cache(capsys, "ls", "--store", store)["documents"]
    assert document["stored_tokens"] == reused[0] == 960 - document["lost_tokens"]


@pytest.mark.parametrize("options", [["--document", "HUT"], ["--system", "Be brief."]])
def test_a_disk_without_room_is_told_at_the_start_and_the_end(tmp_path, capsys, hut, monkeypatch, options):
    """Whatever was asked: nothing else would say why it is read again each time."""
    monkeypatch.setattr("packhorse.store.files.FileSystem.free_bytes", lambda *_: 20 << 20)
    given = [option.replace("HUT", str(hut)) for option in options]
    assert ask(tmp_path / "s", hut, QUESTION, *given, "--json", family="qwen3") == 0
    told = json.loads(capsys.readouterr().out)
    first, last = [note for note in told["notes"] if note.startswith("Warning")]
    for warning in (first, last):
        assert re.search(r"the disk has no room for [\d.]+ [KM]iB beside 1.00 GiB that stay free\.$", warning)
    assert first != last and told["usage"]["reused_tokens"] == 0


def test_a_chat_tells_what_had_no_room(tmp_path, capsys, hut, monkeypatch):
    """Later turns that had room are no reason to keep silent about it."""
    monkeypatch.setattr("packhorse.store.durable.MIN_QUOTA", 0)
    lines = f"/document {hut}\n{QUESTION}\n/reset\n{'Who leads the mules? ' * 16}\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    store = ["--store", str(tmp_path / "s"), "--disk", "1.2MiB"]
    assert cli.run(["chat", str(shared_folder("qwen3", PLAIN)), *FIXED, *store, "--json"]) == 0
    [warning] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Warning")]
    assert warning.startswith("Warning: of what was read some is not kept: the store had no room for it")
    assert [p["label"] for p in cache(capsys, "ls", "--store", tmp_path / "s")["prefixes"]] == ["chat"]


def changed(tmp_path: Path, what: str) -> Path:
    """The model with one thing about it changed."""
    folder = Path(shutil.copytree(shared_folder("qwen3_5", PLAIN), tmp_path / "model"))
    if what == "weight":
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(data)
    elif what == "tokenizer":
        path = folder / "tokenizer.json"
        path.write_text(path.read_text() + "\n")
    elif what == "rope":
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["rope_parameters"] = {**config["rope_parameters"], "rope_theta": 9999.0}
        path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("what", ["nothing", "weight", "tokenizer", "rope", "codec", "exact"])
def test_another_identity_is_not_hit(tmp_path, capsys, hut, what):
    store = tmp_path / "s"
    same = changed(tmp_path / "a", "nothing")
    assert ask(store, hut, QUESTION, model=same) == 0
    figures(capsys)
    other = changed(tmp_path / "b", what)
    more = {"codec": ("--kv", "bf16"), "exact": ("--dtype", "fp32")}.get(what, ())
    arguments = [a for a in FIXED if a != "--exact" or what != "exact"]
    args = ["ask", str(other), *arguments, "--store", str(store), "--document", str(hut), *more, QUESTION]
    assert cli.run(args) == 0
    assert (figures(capsys)[1] == 0) is (what != "nothing")


def test_cache(tmp_path, capsys, hut):
    store = tmp_path / "s"
    ask(store, hut, QUESTION)
    ask(store, hut, "Who is the warden of it?")
    other = tmp_path / "inn.txt"
    other.write_text("The inn has two stables. " * 40)
    ask(store, other, QUESTION)
    capsys.readouterr()
    found = cache(capsys, "ls", "--store", store)
    assert [p["label"] for p in found["prefixes"]] == ["inn.txt", "hut.txt", "hut.txt"]
    assert all(p["tokens"] == p["stored_tokens"] > 900 for p in found["prefixes"])
    inn, last, first = (p["id"] for p in found["prefixes"])
    document = found["documents"][0]
    assert "nine mules" in cache(capsys, "show", first, "--store", store)["text"]
    assert cache(capsys, "verify", "--store", store)["damaged"] == {}
    assert cache(capsys, "pin", last, "--store", store)["pinned"] is True
    assert cache(capsys, "ls", "--store", store)["prefixes"][1]["pinned"] is True
    freed = cache(capsys, "rm", first, "--store", store)["freed_bytes"]
    assert 0 < freed < found["prefixes"][2]["bytes"], "what another needs stays"
    assert cache(capsys, "show", last, "--store", store)["stored_tokens"] > 900
    model = str(shared_folder("qwen3_5", PLAIN))
    hut.write_text(hut.read_text().replace("warden. The hut", "warden. The barn", 1))
    parted = cache(capsys, "why", model, QUESTION, "--document", hut, "--store", store)
    assert parted["label"] == "hut.txt" and parted["after"].endswith("warden. The ")
    assert parted["asked_text"].startswith("barn") and parted["stored_text"].startswith("hut")
    assert cli.run(["cache", "ls", "--store", str(store)]) == 0
    heading, *rows, shared = capsys.readouterr().out.partition("\nrecords:")[0].splitlines()
    assert heading.split()[:4] == ["id", "tokens", "size", "last"] and shared.startswith("What several")
    assert sum(inn in row for row in rows) == 1 and not any("not stored" in row for row in rows)
    assert cli.run(["cache", "rm", last, "--store", str(store)]) == RefusedError.exit_code
    assert f"is pinned.\nFirst: packhorse cache unpin {last} --store" in capsys.readouterr().err
    for little in (last[:3], "doc", "doc-" + document["id"][4:7]):
        assert cli.run(["cache", "rm", little, "--store", str(store)]) == 2
        assert "is too little of an id" in capsys.readouterr().err
    cache(capsys, "unpin", last, "--store", store)
    cache(capsys, "rm", last[:4], "--store", store)
    index = sqlite3.connect(store / "index.sqlite")
    [(pinned, left)] = index.execute("SELECT total(pinned), count(*) FROM records")
    assert pinned == 0 < left, "the document needs some of it, and is not pinned"
    index.close()
    index = sqlite3.connect(store / "index.sqlite")
    index.execute("DELETE FROM records WHERE kind = 'pages'")
    index.commit()
    index.close()
    assert cli.run(["cache", "ls", "--store", str(store)]) == 0
    assert "inn.txt  1,024 tokens of it are not stored" in capsys.readouterr().out
    next((store / "models").glob("*/*")).write_bytes(b"x")
    assert cli.run(["cache", "verify", "--store", str(store)]) == 4
    assert f"1 file of {store} is damaged: " in capsys.readouterr().err
    assert cli.run(["cache", "verify", "--store", str(store), "--json"]) == 4
    assert list(json.loads(capsys.readouterr().out)["damaged"].values()) == ["size"]
    assert cache(capsys, "wipe", "--store", store) == {"deleted": str(store)}
    assert not store.exists()


def test_why_says_how_it_was_read(tmp_path, capsys, hut):
    """What agrees to the last token is of no use to a request in another codec."""
    store, model = tmp_path / "s", str(shared_folder("qwen3", PLAIN))
    ways = []
    for kv in ("bf16", "fp16"):
        assert ask(store, hut, "--kv", kv, QUESTION, family="qwen3") == 0
        capsys.readouterr()
        told = cache(capsys, "why", model, QUESTION, "--document", hut, "--store", store)
        assert told["reason"] == "all that is stored agrees" and told["reused_tokens"] > 900
        ways.append(f"fp32 on cpu, exact, K and V in {kv}")
        assert told["only_for"] == f"requests in {', or in '.join(ways)}"
    assert cli.run(["cache", "ls", "--store", str(store)]) == 0
    shown = capsys.readouterr().out
    assert "(fp32 on cpu, exact; bf16)" in shown and "(fp32 on cpu, exact; fp16)" in shown


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_why_counts_what_is_reused(tmp_path, capsys, hut, family):
    """As many tokens as `ask` reuses then, in whole pages, and up to a state where there is one."""
    store, model = tmp_path / "s", str(shared_folder(family, PLAIN))
    assert ask(store, hut, QUESTION, family=family) == 0
    for question in (QUESTION, "Who is the warden of it?"):
        told = cache_why(capsys, model, question, hut, store)
        assert ask(store, hut, question, family=family) == 0
        assert figures(capsys)[1] == told["reused_tokens"] > 900


def test_why_says_that_nothing_is_reused(tmp_path, capsys, hut):
    """What agrees to its end is of no use where it is too short, or where nothing of it is stored any more."""
    store, model, short = tmp_path / "s", str(shared_folder("qwen3", PLAIN)), tmp_path / "short.txt"
    short.write_text("The barn has two doors. " * 6)
    assert ask(store, short, QUESTION, family="qwen3") == 0
    told = cache_why(capsys, model, QUESTION, short, store)
    assert told["agreed_tokens"] > 128 and told["reused_tokens"] == told["stored_tokens"] == 0
    assert told["reason"].endswith("nothing is reused: under 256 tokens the text alone is stored")
    found = cache(capsys, "ls", "--store", store)["documents"]
    assert [(d["text_only"], d["lost_tokens"]) for d in found] == [(True, 0)]
    assert cli.run(["cache", "ls", "--store", str(store)]) == 0
    assert "short.txt  text only (under 256 tokens)\n" in capsys.readouterr().out
    assert cli.run(["cache", "export", found[0]["id"], str(tmp_path / "x"), "--store", str(store)]) == 0
    assert "Warning: no page of it is stored" in capsys.readouterr().err
    assert ask(store, hut, QUESTION, family="qwen3") == 0
    with sqlite3.connect(store / "index.sqlite") as index:
        index.execute("DELETE FROM records")
    told = cache_why(capsys, model, QUESTION, hut, store)
    assert told["lost_tokens"] > 900 and told["reason"].endswith(
        "nothing is reused: no page or state of it is there"
    )


def cache_why(capsys, model: str, question: str, document: Path, store: Path) -> dict:
    capsys.readouterr()
    return cache(capsys, "why", model, question, "--document", document, "--store", store)


def test_nothing_is_left_of_a_write_that_failed(tmp_path, capsys, hut, monkeypatch):
    """Neither files nor a row that says so."""

    def full(*_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr("packhorse.store.files.FileSystem.write", full)
    assert ask(tmp_path / "s", hut, QUESTION, family="qwen3") == 0
    assert "may not be kept: a write failed: File too large." in capsys.readouterr().err
    found = cache(capsys, "ls", "--store", tmp_path / "s")
    assert (found["records"], found["documents"], found["prefixes"]) == (0, [], [])


def test_export_overwrites_exports_alone(tmp_path, capsys, hut):
    store, file, other = tmp_path / "s", tmp_path / "x", tmp_path / "diary"
    other.write_text("Dear diary")
    assert ask(store, hut, QUESTION, family="qwen3") == 0
    capsys.readouterr()
    name = cache(capsys, "ls", "--store", store)["documents"][0]["id"]
    for _ in range(2):
        cache(capsys, "export", name, file, "--store", store)
    assert cli.run(["cache", "export", name, str(other), "--store", str(store)]) == RefusedError.exit_code
    assert capsys.readouterr().err == f"Error: {other} is there and no export.\nName another, or delete it.\n"
    assert other.read_text() == "Dear diary"


def test_what_cannot_be_deleted_is_refused(tmp_path, capsys, monkeypatch):
    """As on a file system that cannot be written."""
    DurableStore(tmp_path / "s", quota=1 << 30).close()
    true_rmdir = os.rmdir

    def refuse(path, *args, **options):
        if path == "models":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        true_rmdir(path, *args, **options)

    monkeypatch.setattr(os, "rmdir", refuse)
    assert cli.run(["cache", "wipe", "--store", str(tmp_path / "s")]) == RefusedError.exit_code
    first, hint = capsys.readouterr().err.splitlines()
    assert (
        f"{tmp_path / 's'} cannot be deleted: Read-only file system." in first
        and "so that you may write" in hint
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["ls"], "is no store"),
        (["show"], "takes ID, and 0 were given"),
        (["ls", "x"], "takes no target, and 1 were given"),
        (["ls", "--document", "x.txt"], "for cache why alone"),
        (["wipe"], "is no store"),
        (["import", "x"], "to import, first: packhorse ask MODEL --store"),
    ],
)
def test_wrong_uses(tmp_path, capsys, args, words):
    assert cli.run(["cache", *args, "--store", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_options_that_do_nothing_are_refused(tmp_path, capsys, hut):
    assert cli.run(["ask", "x", "--disk", "1GiB", QUESTION]) == 2
    assert "there is none" in capsys.readouterr().err
    assert ask(tmp_path / "s", hut, "--disk", "1MiB", QUESTION) == 2
    assert "is the least" in capsys.readouterr().err
    assert ask(tmp_path, hut, QUESTION) == 2
    assert "is no store" in capsys.readouterr().err
    assert cli.run(["ask", str(shared_folder("qwen3_5", PLAIN)), "--ram", "900TiB", QUESTION]) == 3
    assert "921600.00 GiB" in capsys.readouterr().err


def test_ask_keeps_its_document(tmp_path, capsys, hut):
    store = tmp_path / "s"
    ask(store, hut, QUESTION)
    ask(store, hut, "--system", "Be brief.", QUESTION)
    capsys.readouterr()
    found = cache(capsys, "ls", "--store", store)
    [document] = found["documents"]
    assert (
        document["label"] == "hut.txt" and document["id"].startswith("doc-") and len(found["prefixes"]) == 2
    )
    assert document["stored_tokens"] == document["tokens"] // 64 * 64 > 900
    shown = cache(capsys, "show", document["id"], "--store", store)
    text = hut.read_text()
    assert shown["pages"] == [[1, 0, len(text)]]
    assert shown["text"].startswith("The hut has nine mules")
    assert cache(capsys, "pin", document["id"], "--store", store)["pinned"] is True
    assert ask(store, hut, "Who is the warden of it?") == 0
    assert figures(capsys)[1] > 900
    assert cache(capsys, "show", document["id"], "--store", store)["pinned"] is True, "a question is no unpin"
    cache(capsys, "unpin", document["id"], "--store", store)
    assert cache(capsys, "rm", document["id"], "--store", store)["freed_bytes"] > 0
    assert cache(capsys, "ls", "--store", store)["documents"] == []
    assert ask(store, hut, QUESTION) == 0
    assert figures(capsys)[1] < 64, "what was asked about it has gone with it"


def test_what_is_too_old_is_read_again(tmp_path, capsys, hut, monkeypatch):
    store, now = tmp_path / "s", 1e9
    monkeypatch.setattr("packhorse.store.files.FileSystem.now", lambda _: now)
    for days, found in ((0.0, False), (1.5, True), (2.5, False), (3.0, True)):
        now = 1e9 + days * 86400
        assert ask(store, hut, "--keep-days", "2", QUESTION) == 0
        assert (figures(capsys)[1] > 900) is found, days
    assert cli.run(["ask", "x", "--keep-days", "2", QUESTION]) == 2
    assert "there is none" in capsys.readouterr().err
    assert ask(store, hut, "--keep-days", "0", QUESTION) == 2
    assert "--keep-days is 0.0" in capsys.readouterr().err


def test_what_is_removed_is_gone_from_the_index_too(tmp_path, capsys):
    store, secret = tmp_path / "s", tmp_path / "secret.txt"
    secret.write_text("".join(f"Xylograph number {n} is kept in vault {n * 7}. " for n in range(25)))
    ask(store, secret, QUESTION)
    capsys.readouterr()
    tokens = byte_tokenizer().encode("Xylograph number 3 is kept in vault 21.").ids
    traces = (array("I", tokens).tobytes(), zlib.compress(secret.read_text().encode())[2:200])

    def found() -> list[bool]:
        data = b"".join(path.read_bytes() for path in store.rglob("*") if path.is_file())
        return [trace in data for trace in traces]

    assert found() == [True, True]
    [document] = cache(capsys, "ls", "--store", store)["documents"]
    cache(capsys, "rm", document["id"], "--store", store)
    assert found() == [False, False]


def test_verify_store(tmp_path, capsys):
    assert cli.run(["verify", "store", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] and all(row["happened"] == row["expected"] for row in told["rows"])
    assert {f"crash: {step}" for step in files.STEPS} < {row["fault"] for row in told["rows"]}
    assert list(tmp_path.iterdir()) == []


def test_verify_store_fails_where_damage_is_believed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("packhorse.verify.store.STEPS", ())
    monkeypatch.setattr("packhorse.store.durable.zlib.crc32", lambda data: 0)
    assert cli.run(["verify", "store", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    [failed] = [line for line in lines if line.startswith("FAILED")]
    assert (
        "bit flip" in failed and "WRONG BYTES" in failed and "expected: miss checksum" in failed and lines[1:]
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free", "num_rows"), [([2 << 20], 0), ([8 << 20, 8 << 20, 3 << 20], 1)])
def test_verify_store_wants_room(tmp_path, capsys, monkeypatch, free, num_rows):
    """Nothing is called lost where the disk was full, as before the trials or by somebody else after one."""
    seen = iter(free)
    monkeypatch.setattr("packhorse.verify.store.FileSystem.free_bytes", lambda *_: next(seen))
    monkeypatch.setattr("packhorse.verify.store._fail", lambda faults, folder: "LOST, OR LEFT SOMETHING")
    assert cli.run(["verify", "store", str(tmp_path)]) == 3
    told = capsys.readouterr()
    assert f"need 4.00 MiB of the disk of {tmp_path}, and {free[-1] >> 20}.00 MiB are free" in told.err
    assert "Make room there" in told.err and len(told.out.splitlines()) == num_rows
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [(["/nonexistent"], "is no folder"), ([".", "--as-arch", "75", "--offline"], "--as-arch, --offline")],
)
def test_wrong_uses_of_verify_store(args, words, capsys):
    assert cli.run(["verify", "store", *args]) == 2
    assert words in capsys.readouterr().err
