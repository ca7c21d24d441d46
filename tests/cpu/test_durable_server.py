"""A server over a store: restarts, keys, store: false, meters, health."""

import json
import re
from pathlib import Path

import httpx
import pytest

import servers
from packhorse.core.config import EngineConfig
from packhorse.server.config import ServerConfig
from packhorse.server.keys import Keyring
from packhorse.text import tokenizer

TEXT = "The hut has nine mules and one warden. " * 30
KEYS = {"ann": "a" * 20, "bob": "b" * 20}


def engine(folder: Path) -> EngineConfig:
    return EngineConfig(context=4096, sequences=2, threads=1, exact=True, store=folder)


def keyring(tmp_path: Path) -> Keyring:
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[{name}]\nkey = "{key}"\n' for name, key in KEYS.items()))
    path.chmod(0o600)
    return Keyring.load(path)


def cached(live: servers.Live, question: str, key: str | None = None, **fields) -> int:
    """Asks about TEXT; tokens of the prompt that were not read again. Waits until all is written."""
    headers = {"authorization": f"Bearer {KEYS[key]}"} if key else {}
    messages = [{"role": "user", "content": TEXT + question}]
    body = {"model": servers.NAME, "messages": messages, "max_tokens": 2, **fields}
    answer = httpx.post(live.url + "/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    live.wait_idle()
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def figure(live: servers.Live, name: str, label: str) -> float:
    found = re.search(rf'^{name}{{\w+="{label}"}} (\S+)$', live.get("/metrics").text, re.MULTILINE)
    assert found is not None, f"{name} {label}"
    return float(found[1])


def test_restarts_and_meters(tmp_path):
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        assert cached(live, "How many?") == 0
        live.wait(lambda: figure(live, "packhorse_store_held", "backlog_bytes") == 0)
        live.wait(lambda: figure(live, "packhorse_store_total", "disk_written_bytes") > 100_000)
        assert live.get("/health").json()["status"] == "ready"
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        assert cached(live, "Who is it?") > 1000
        assert figure(live, "packhorse_store_total", "hits_disk") == 1
        told = [figure(live, "packhorse_reuse_total", name) for name in ("opened", "hits", "reused_tokens")]
        assert told[:2] == [1, 1] and told[2] > 1000
        assert figure(live, "packhorse_store_total", "restored_tokens") > 1000
        files = [p for p in (tmp_path / "s" / "models").glob("*/*") if p.suffix == ".safetensors"]
        assert figure(live, "packhorse_store_held", "disk_records") == len(files) > 1


def test_what_is_short_is_written_when_it_comes_again_or_is_a_documents(tmp_path):
    short = TEXT[:700]
    part = {"type": "document", "title": "hut.txt", "source": {"type": "text", "data": short}}
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        for question, records in (("How many? " * 9, 0), ("Who is it? " * 9, 1)):
            cached(live, "", messages=[{"role": "user", "content": short + question}])
            live.wait(lambda: figure(live, "packhorse_store_held", "backlog_bytes") == 0)
            assert (figure(live, "packhorse_store_held", "disk_records") > 0) is (records > 0)
        assert figure(live, "packhorse_store_total", "skipped_once") == 1
        assert figure(live, "packhorse_store_total", "cut_once") == 1
    with servers.scripted(engine=engine(tmp_path / "other")) as live:
        content = [part, {"type": "text", "text": "How many?"}]
        assert cached(live, "", messages=[{"role": "user", "content": content}]) == 0
        live.wait(lambda: figure(live, "packhorse_store_held", "disk_records") > 0)


def test_misses_are_counted_by_reason_and_damage_is_logged(tmp_path, capsys):
    other = "The inn has two stables and no mule. " * 30
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        assert cached(live, "How many?") == 0
        assert figure(live, "packhorse_store_total", "miss_absent") == 1
    for path in (tmp_path / "s" / "models").glob("*/*"):
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    assert "lost_records" not in capsys.readouterr().err
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        assert cached(live, "How many?") == 0
        lost = figure(live, "packhorse_store_total", "miss_checksum")
        assert lost >= 1 and figure(live, "packhorse_store_held", "disk_quota_bytes") > 0
        logged = [json.loads(line) for line in capsys.readouterr().err.splitlines() if "lost_records" in line]
        assert logged[-1]["lost_records"] == {"checksum": lost}
        live.wait(lambda: figure(live, "packhorse_store_held", "backlog_bytes") == 0)
        assert cached(live, "Who is it?") > 1000, "it was written again"
        # A prompt that leaves what is stored where there is no state.
        assert cached(live, "", messages=[{"role": "user", "content": TEXT[:700] + other}]) == 0


@pytest.mark.parametrize("shared", [False, True])
def test_keys_are_tenants(tmp_path, shared):
    config = ServerConfig(port=0, shared_store=shared)
    with servers.scripted(config=config, engine=engine(tmp_path / "s"), keyring=keyring(tmp_path)) as live:
        assert cached(live, "How many?", "ann") == 0
        assert (cached(live, "How many?", "bob") > 1000) is shared
        assert cached(live, "Who?", "ann") > 1000
    with servers.scripted(config=config, engine=engine(tmp_path / "s"), keyring=keyring(tmp_path)) as live:
        assert cached(live, "Who?", "bob") > 1000, "its own"


def test_prompts_go_on_from_ids_of_the_same_key_alone(tmp_path, monkeypatch):
    """What is not encoded again is known to its caller only, and store: false neither uses nor leaves any."""
    monkeypatch.setattr(
        tokenizer, "_splits_by_rule", lambda _: True
    )  # a byte is a token here: any cut is right
    monkeypatch.setattr(tokenizer, "LONG_CHARS", 256)
    monkeypatch.setattr(tokenizer, "KNOWN_CHARS", 64)
    encode, lengths = tokenizer.Tokenizer._encode, []

    def recorded(self, text, special):
        lengths.append(len(text))
        return encode(self, text, special)

    monkeypatch.setattr(tokenizer.Tokenizer, "_encode", recorded)
    text = TEXT.replace(". ", ".\n")
    with servers.scripted(engine=engine(tmp_path / "s"), keyring=keyring(tmp_path)) as live:

        def whole(question: str, key: str, **fields) -> bool:
            lengths.clear()
            cached(live, "", key, messages=[{"role": "user", "content": text + question}], **fields)
            return max(lengths) > len(text)

        assert whole("How many?", "ann") and not whole("Who?", "ann")
        assert whole("Which?", "bob", store=False) and whole("Who?", "bob") and not whole("Why?", "bob")
        assert whole("Who?", "ann", store=False)
        headers = {"authorization": f"Bearer {KEYS['ann']}"}
        files = {"file": ("hut.txt", text.encode())}
        added = httpx.post(live.url + "/v1/documents", files=files, headers=headers, timeout=60).json()
        assert not whole("Where?", "ann")
        httpx.delete(f"{live.url}/v1/documents/{added['id']}", headers=headers, timeout=30).raise_for_status()
        assert whole("Where?", "ann") and not whole("Where?", "bob")


def test_store_false_leaves_nothing(tmp_path):
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        assert cached(live, "How many?", store=False) == 0
        assert cached(live, "How many?", store=False) == 0
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        assert list((tmp_path / "s" / "models").glob("*/*")) == []
        assert cached(live, "How many?", store=True) == 0
        assert cached(live, "How many?", store=False) > 1000


@pytest.mark.parametrize(
    "error", [OSError(2, "No such file or directory"), RuntimeError("an index that is none")]
)
def test_writing_that_fails_between_steps_ends_nothing(tmp_path, monkeypatch, error):
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        lower = live.service.session.engine.store.lower

        def fail(_):
            raise error

        monkeypatch.setattr(lower, "_begin", fail)
        assert cached(live, "How many?") == 0
        live.wait(lambda: lower.counters["failed_copies"] == 1)
        live.wait(lambda: live.get("/health").json()["status"] == "degraded")
        assert str(error) in live.get("/health").json()["reason"]
        assert cached(live, "Who is it?") > 1000, "still on the device"
        monkeypatch.undo()
        assert cached(live, "How many mules are there, and who leads them? " * 20) > 1000
        live.wait(lambda: lower.events.get("disk_written_bytes", 0) > 100_000)


def test_a_store_without_room_degrades_health(tmp_path, monkeypatch):
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        monkeypatch.setattr("packhorse.store.files.FileSystem.free_bytes", lambda *_: 20 << 20)
        assert cached(live, "How many?") == 0
        live.wait(lambda: live.get("/health").json()["status"] == "degraded")
        assert "beside 1.00 GiB that stay free" in live.get("/health").json()["reason"]
        monkeypatch.undo()
        assert cached(live, "How many mules are there, and who leads them? " * 20) > 1000
        live.wait(lambda: live.get("/health").json()["status"] == "ready")


def test_a_store_that_fails_degrades_health(tmp_path, monkeypatch):
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        disk = live.service.session.engine.store.lower.disk

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(disk.files, "write", full)
        assert cached(live, "How many?") == 0
        live.wait(lambda: live.get("/health").json()["status"] == "degraded")
        assert "No space left on device" in live.get("/health").json()["reason"]
        assert live.get("/health").status_code == 200
        monkeypatch.undo()
        assert cached(live, "How many mules are there, and who leads them? " * 20) > 1000
        live.wait(lambda: live.get("/health").json()["status"] == "ready")
