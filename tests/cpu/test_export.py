"""Exported and imported: the same answers from what another store has read, and nothing that was tampered with."""

import errno
import json
import os
from array import array
from pathlib import Path
from random import Random

import pytest
from test_durable_cli import FIXED, QUESTION, ask, cache, figures, hut  # noqa: F401

import durable_files as numbers
from chats import PLAIN, shared_folder
from packhorse.cli import main as cli
from packhorse.core.errors import DoesNotFitError, NotAuthenticError, PackhorseError, RefusedError
from packhorse.store.durable import DurableStore
from packhorse.store.export import export_prefix, import_prefix
from packhorse.store.prefix import chain_value
from packhorse.store.records import Image, Kind, Record, chain_values

OTHER = "Who is the warden of it?"


@pytest.fixture
def key_file(tmp_path) -> Path:
    path = tmp_path / "key"
    path.write_text("a passphrase of some length\n")
    return path


def fails(capsys, *args: object) -> dict:
    """The error of a cache command."""
    code = cli.run(["cache", *map(str, args), "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    return {**error, "code": code}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_another_store_goes_on_from_it(tmp_path, capsys, hut, key_file, family):  # noqa: F811
    here, there, file = tmp_path / "a", tmp_path / "b", tmp_path / "hut.export"
    ask(here, hut, QUESTION, family=family)
    capsys.readouterr()
    ask(here, hut, OTHER, family=family)
    _, _, other = figures(capsys)
    [document] = cache(capsys, "ls", "--store", here)["documents"]
    told = cache(capsys, "export", document["id"], file, "--key-file", key_file, "--store", here)
    assert (
        told["file_bytes"] == file.stat().st_size > told["tokens"] * 100 and file.stat().st_mode & 0o077 == 0
    )
    assert sorted(p.name for p in tmp_path.glob("hut.export*")) == ["hut.export"]
    cli.run(["ask", str(shared_folder(family, PLAIN)), *FIXED, "--store", str(there), "Hello?"])
    capsys.readouterr()
    imported = cache(capsys, "import", file, "--key-file", key_file, "--store", there)
    assert imported["label"] == "hut.txt" and imported["id"] != document["id"], "an id is its store's"
    [found] = cache(capsys, "ls", "--store", there)["documents"]
    assert found["id"] == imported["id"] and found["stored_tokens"] == document["stored_tokens"]
    assert cache(capsys, "verify", "--store", there)["damaged"] == {}
    assert cache(capsys, "show", found["id"], "--store", there)["pages"] == [[1, 0, len(hut.read_text())]]
    ask(there, hut, OTHER, family=family)
    again = figures(capsys)
    assert again[1] >= document["tokens"] // 64 * 64 > 900 and again[2] == other
    assert cache(capsys, "import", file, "--key-file", key_file, "--store", there)["id"] == found["id"]


def test_back_into_the_same_store(tmp_path, capsys, hut):  # noqa: F811
    store, file = tmp_path / "s", tmp_path / "x"
    ask(store, hut, QUESTION)
    capsys.readouterr()
    found = cache(capsys, "ls", "--store", store)
    document, prefix = found["documents"][0], found["prefixes"][0]
    cache(capsys, "export", prefix["id"], file, "--store", store)
    cache(capsys, "rm", document["id"], "--store", store)  # and what was asked about it
    assert cache(capsys, "ls", "--store", store)["records"] == 0
    imported = cache(capsys, "import", file, "--store", store)
    assert imported["id"] == prefix["id"] and imported["tokens"] == prefix["tokens"]
    ask(store, hut, QUESTION)
    assert figures(capsys)[1] == prefix["tokens"]
    # Without a passphrase no other store takes it.
    ask(tmp_path / "t", hut, QUESTION)
    capsys.readouterr()
    error = fails(capsys, "import", file, "--store", tmp_path / "t")
    assert (error["kind"], error["code"]) == ("not_authentic", 4)


def read_only(*_, **__):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_what_is_not_authentic_or_fits_not_is_refused(
    tmp_path,
    capsys,
    hut,  # noqa: F811
    key_file,
    monkeypatch,
):
    store, file = tmp_path / "s", tmp_path / "x"
    ask(store, hut, QUESTION)
    capsys.readouterr()
    [document] = cache(capsys, "ls", "--store", store)["documents"]
    cache(capsys, "export", document["id"], file, "--key-file", key_file, "--store", store)
    wrong = tmp_path / "wrong"
    wrong.write_text("another passphrase of some length")
    errors = [
        fails(capsys, "import", file, "--key-file", wrong, "--store", store),
        fails(capsys, "import", file, "--store", store),
        fails(capsys, "import", hut, "--store", store),
        fails(capsys, "import", tmp_path / "absent", "--store", store),
        fails(capsys, "import", tmp_path, "--store", store),
    ]
    assert [e["kind"] for e in errors] == ["not_authentic"] * 2 + ["refused"] * 3
    assert all(error["hint"] for error in errors)
    (tmp_path / "short").write_text("short")
    for words, args in (
        ("16 are the least", ["import", file, "--key-file", tmp_path / "short"]),
        ("cannot be read", ["import", file, "--key-file", tmp_path / "absent"]),
        ("export and import alone", ["ls", "--key-file", wrong]),
        ("takes ID and FILE", ["export", document["id"]]),
    ):
        error = fails(capsys, *args, "--store", store)
        assert error["code"] == 2 and words in error["reason"]
    other = tmp_path / "other"
    cli.run(["ask", str(shared_folder("qwen3", PLAIN)), *FIXED, "--store", str(other), "Hello?"])
    capsys.readouterr()
    error = fails(capsys, "import", file, "--key-file", key_file, "--store", other)
    assert error["kind"] == "refused" and "knows none of that identity" in error["reason"]
    for words, target in (("does not exist", tmp_path / "no" / "x"), ("is a folder", tmp_path)):
        error = fails(capsys, "export", document["id"], target, "--store", store)
        assert error["code"] == 2 and words in error["reason"] and error["hint"]
    opened = DurableStore(store, quota=1 << 30)
    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    [prefix] = [p for p in opened.prefixes() if p.document]
    with pytest.raises(PackhorseError, match="cannot be written: Read-only file system") as caught:
        export_prefix(opened, prefix, tmp_path / "y", None)
    assert caught.value.hint
    monkeypatch.undo()
    opened.close()
    for path in (store / "models").glob("*/*"):
        path.write_bytes(b"x")
    error = fails(capsys, "export", document["id"], file, "--store", store)
    assert error["kind"] == "corrupt_file" and file.stat().st_size > 1000, "the older file stays"


def test_every_change_is_noticed(tmp_path, capsys, hut):  # noqa: F811
    """300 flips, cuts and exchanged images: never imported, always a typed error, and the store is as before."""
    folder, file = tmp_path / "s", tmp_path / "x"
    ask(folder, hut, QUESTION)
    store = DurableStore(folder, quota=1 << 40)
    with store.transaction() as write:
        write.execute("UPDATE prefixes SET lifetime = 600.0")
    [prefix] = store.prefixes("documents.id IS NOT NULL")
    expires = prefix.created + 600.0
    size = export_prefix(store, prefix, file, None)
    store.remove(prefix)
    for other in store.prefixes():
        store.remove(other)
    good, random = file.read_bytes(), Random(3)
    for _ in range(300):
        data = bytearray(good)
        if random.random() < 0.8:
            data[random.randrange(size)] ^= 1 << random.randrange(8)
        elif random.random() < 0.5:
            del data[random.randrange(size) :]
        else:
            at, to = sorted(random.sample(range(19, size - 5000), 2))
            data[at : at + 500], data[to : to + 500] = data[to : to + 500], data[at : at + 500]
        if data == good:
            continue
        file.write_bytes(data)
        with pytest.raises(RefusedError) as caught:
            import_prefix(store, file, None)
        assert caught.value.kind in ("refused", "not_authentic", "corrupt_file")
        assert store.prefixes() == []
    file.write_bytes(good)
    assert store.files.now() < expires
    store.reserve = 1 << 60
    with pytest.raises(DoesNotFitError):
        import_prefix(store, file, None)
    store.reserve = 0
    assert import_prefix(store, file, None)["tokens"] == len(prefix.tokens) // 4
    [again] = store.prefixes()
    assert abs(again.created + again.lifetime - expires) < 1e-3, "its time runs on"
    store.close()


def test_only_what_is_the_prefixs_is_exported(tmp_path):
    """A record that goes on behind the prefix, or parts from it, is cut."""
    store = DurableStore(tmp_path / "s", quota=1 << 30, reserve=0)
    model = store.add_model(b"m" * 32, {"name": "numbers", "page_len": "4"})

    def chain(key: bytes, page: bytes) -> bytes:
        return chain_value(store.secret, key, page)

    root, tokens = b"r" * 32, array("I", range(64)).tobytes()
    keys = [root, *chain_values(root, tokens, 0, 16, 16, chain)]
    image = Image.make(Record(Kind.PAGES, root, keys[16], 0, 64, tokens), {"layers.0": (16, 100)})
    image.parts["layers.0"][:] = numbers.content(0, 0, 1600)
    assert store.write(model, [image])
    parted = tokens[:80] + array("I", range(100, 103)).tobytes()
    store.note_prefix(model, root, b"k" * 32, parted, "x")
    [prefix] = store.prefixes()
    assert export_prefix(store, prefix, tmp_path / "x", None) < 20_000
    assert numbers.content(0, 0, 1600)[500:520] not in (tmp_path / "x").read_bytes()
    store.remove(prefix)
    assert store.usage()["records"] == 0
    import_prefix(store, tmp_path / "x", None)
    [record] = store.candidates([root])
    assert (record.start, record.stop, record.tokens) == (0, 20, tokens[:80])
    assert bytes(store.read(record).parts["layers.0"]) == numbers.content(0, 0, 1600)[:500]
    with pytest.raises(NotAuthenticError):
        import_prefix(store, tmp_path / "x", b"another")
    store.close()
