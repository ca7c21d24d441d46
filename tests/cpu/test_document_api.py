"""Documents of the API: read once, named by an id, found after a restart, and nobody else's."""

import base64
import json
import sqlite3
from pathlib import Path

import httpx
import pytest
from test_documents import write_pdf
from test_durable_server import KEYS, keyring

import servers
from packhorse.cli import main as cli
from packhorse.cli.cache import describe
from packhorse.core.config import EngineConfig
from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import MIB
from packhorse.engine.documents import read_as_prompt
from packhorse.facts.read import read_model
from packhorse.server.config import ServerConfig
from packhorse.store.documents import NewDocument, add_document, find_document, owner_of, root_of
from packhorse.text.documents import Document, document_text
from packhorse.text.template import ChatTemplate
from packhorse.text.tokenizer import Tokenizer
from smollm2 import smollm2

TEXT = "The hut has nine mules and one warden. " * 40
PAGES = ["The hut has nine mules. " * 30, "", "The warden is Marta. " * 30]


def engine(folder: Path | None, **fields) -> EngineConfig:
    return EngineConfig(context=4096, sequences=2, threads=1, exact=True, store=folder, **fields)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[key]}"}


def ask(live: servers.Live, parts: list, **options) -> dict:
    """The answer to a message of these parts."""
    messages = [{"role": "user", "content": parts}]
    body = {"model": servers.NAME, "messages": messages, "max_tokens": 4, "temperature": 0, "store": False}
    return live.post("/v1/chat/completions", body, **options).json()


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def by_id(name: str) -> dict:
    return {"type": "file", "file": {"file_id": name}}


def question(text: str = "How many mules?") -> dict:
    return {"type": "text", "text": text}


def test_a_document_is_read_once(tmp_path):
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        added = live.post("/v1/documents", {"name": "hut.txt", "text": TEXT}).json()
        assert added["object"] == "document" and added["name"] == "hut.txt" and added["pages"] == 1
        assert 1500 < added["tokens"] < 1700 and added["expires_at"] is None and added["pinned"] is False
        assert min(added["bytes"]["device"], added["bytes"]["disk"]) > 100_000
        assert added["bytes"]["host"] == 0
        boundary = added["tokens"] // 64 * 64
        first = ask(live, [by_id(added["id"]), question()])
        assert cached(first) == boundary
        again = live.post("/v1/documents", {"name": "hut.txt", "text": TEXT, "pin": True}).json()
        assert again["id"] == added["id"] and again["pinned"] is True
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        [listed] = live.get("/v1/documents").json()["data"]
        assert listed["id"] == added["id"] and listed["pinned"] is True and "page_map" not in listed
        assert listed["bytes"]["device"] == 0 and listed["bytes"]["disk"] == added["bytes"]["disk"]
        second = ask(live, [by_id(added["id"]), question()])
        assert cached(second) == boundary, "a new process reads it from the disk"
        assert second["choices"] == first["choices"]
        typed = ask(live, [question(f"Document hut.txt:\n\n{TEXT.strip()}\n\n"), question()])
        assert typed["choices"] == first["choices"], "it is the prompt that ask --document makes"
        assert cached(ask(live, [{"type": "document", "source": {"type": "file", "file_id": added["id"]}},
                                 question("Who leads them?")])) == boundary  # fmt: skip
        deleted = live_delete(live, added["id"])
        assert deleted["deleted"] is True and deleted["freed_bytes"] >= added["bytes"]["disk"]
        assert live.get("/v1/documents").json()["data"] == []
        assert list((tmp_path / "s" / "models").glob("*/*")) == [], "nothing of it stays on disk"
        assert ask(live, [by_id(added["id"]), question()])["error"]["code"] == "document_not_found"


def live_delete(live: servers.Live, name: str, **options) -> dict:
    return httpx.delete(f"{live.url}/v1/documents/{name}", timeout=30, **options).json()


def test_pdf_by_form_and_in_base64(tmp_path):
    path = write_pdf(tmp_path / "hut.pdf", PAGES)
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        form = {"purpose": "user_data", "expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}
        sent = httpx.post(
            live.url + "/v1/documents", files={"file": ("hut.pdf", path.read_bytes())}, data=form, timeout=60
        )
        assert sent.headers["x-packhorse-ignored"] == "purpose"
        added = sent.json()
        assert added["pages"] == 3 and added["empty_pages"] == [2]
        assert added["expires_at"] == added["created_at"] + 60
        shown = live.get(f"/v1/documents/{added['id']}").json()
        ends = [(page["page"], page["end"] - page["start"]) for page in shown["page_map"]]
        assert ends == [(1, 719), (2, 0), (3, 629)]
        data = base64.b64encode(path.read_bytes()).decode()
        inline = {"filename": "hut.pdf", "file_data": f"data:application/pdf;base64,{data}"}
        boundary = added["tokens"] // 64 * 64
        assert cached(ask(live, [{"type": "file", "file": inline}, question()])) == boundary
        source = {"type": "base64", "media_type": "application/pdf", "data": data}
        part = {"type": "document", "title": "hut.pdf", "source": source}
        assert cached(ask(live, [part, question()])) == boundary
        again = live.post("/v1/documents", {"name": "hut.pdf", "file_data": data}).json()
        assert again["id"] == added["id"] and again["expires_at"] is None


def test_names_and_fields_are_any_text(refusing):
    body = {
        "name": "Vertrag\n\x1b№1.pdf",
        "text": "Nine mules.",
        "Unbekanntes Feld №": 1,
        "purpose": "user_data",
    }
    added = refusing.post("/v1/documents", body)
    assert added.json()["name"] == "Vertrag№1.pdf"
    assert added.headers["x-packhorse-ignored"] == "Unbekanntes?Feld??, purpose"


def test_progress_comes_as_a_stream(tmp_path):
    config = engine(tmp_path / "s", chunk_len=512, snapshot_len=512)
    with servers.scripted(engine=config) as live:
        events = live.stream("/v1/documents", {"text": TEXT})
        progress, told, done = events[:-2], events[-2], events[-1]
        assert [e["processed"] for e in progress] == sorted({e["processed"] for e in progress})
        assert len(progress) >= 3 and progress[0]["total"] > 1500
        assert told["object"] == "document" and told["name"] == "document" and done == "[DONE]"


@pytest.mark.parametrize("shared", [False, True])
def test_documents_belong_to_a_key(tmp_path, shared):
    config = ServerConfig(port=0, shared_store=shared)
    with servers.scripted(config=config, engine=engine(tmp_path / "s"), keyring=keyring(tmp_path)) as live:
        added = live.post("/v1/documents", {"text": TEXT}, headers=bearer("ann")).json()
        assert live.get(f"/v1/documents/{added['id']}", headers=bearer("ann")).status_code == 200
        status = 200 if shared else 404
        assert live.get(f"/v1/documents/{added['id']}", headers=bearer("bob")).status_code == status
        assert len(live.get("/v1/documents", headers=bearer("bob")).json()["data"]) == shared
        answer = ask(live, [by_id(added["id"]), question()], headers=bearer("bob"))
        assert (answer.get("error", {}).get("code") == "document_not_found") is not shared
        if not shared:
            assert (
                live_delete(live, added["id"], headers=bearer("bob"))["error"]["code"] == "document_not_found"
            )
            other = live.post("/v1/documents", {"text": TEXT}, headers=bearer("bob")).json()
            assert other["id"] != added["id"], "not even the id tells that another has it"
            live_delete(live, other["id"], headers=bearer("bob"))
        assert cached(ask(live, [by_id(added["id"]), question()], headers=bearer("ann"))) > 1400
        disk = live.service.documents.disk
        assert {describe(disk, prefix)["for_a_key"] for prefix in disk.prefixes()} == {not shared}


def test_a_document_has_a_limit_of_its_own(tmp_path):
    config = ServerConfig(port=0, body_limit=200, document_limit=2000)
    with servers.scripted(config=config, engine=engine(tmp_path / "s")) as live:
        assert live.post("/v1/documents", {"text": TEXT[:1000]}).status_code == 200
        refused = live.post("/v1/documents", {"text": TEXT[:1000] * 2})
        error = refused.json()["error"]
        assert (refused.status_code, error["limit_bytes"]) == (413, 2000) and "document_limit" in error[
            "message"
        ]


def test_short_documents_are_kept_as_text(tmp_path):
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        added = live.post("/v1/documents", {"name": "n.txt", "text": "Nine mules."}).json()
        assert added["bytes"]["disk"] == 0 and added["tokens"] < 64
        other = live.post("/v1/documents", {"name": "n.txt", "text": "Ten mules."}).json()
        assert len({added["id"], other["id"]}) == 2 == len(live.get("/v1/documents").json()["data"])
        assert ask(live, [by_id(added["id"]), question("[[Nine.]]")])["choices"][0]["message"]["content"]
        live_delete(live, added["id"])
        assert [d["id"] for d in live.get("/v1/documents").json()["data"]] == [other["id"]]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "file", "0 documents were given"),
        ({"text": "x", "file_data": "eA=="}, "file", "2 documents were given"),
        ({"text": "  "}, "file", "is empty"),
        ({"text": "", "name": "a.txt"}, "file", "The document a.txt is empty"),
        ({"text": "a\0b", "name": "b.pdf"}, "file", "b.pdf looks like a binary file"),
        ({"text": "x", "store": False}, "store", "Send it in a message of a chat"),
        ({"file_data": "TVoAAA==", "name": "t.exe"}, "file", "t.exe looks like a binary file"),
        ({"file_data": "!!"}, "file_data", "is no base64"),
        ({"name": "x.pdf", "file_data": "eA=="}, "file", "cannot be read as a PDF"),
        ({"text": TEXT * 4}, "file", "maximum context length is 4096"),
        ({"text": TEXT * 4}, "file", "Or split the document"),
        (
            {"text": "x", "expires_after": {"seconds": 0}},
            "expires_after.seconds",
            "greater than or equal to 1",
        ),
        ({"text": "x", "model": "other"}, "model", "There is no model"),
    ],
)
def test_documents_that_are_refused(refusing, body, param, words):
    error = refusing.post("/v1/documents", body).json()["error"]
    assert words in error["message"] and error["param"] == param
    assert "A chat may send" not in error["message"]


def test_a_form_that_asks_not_to_be_kept_is_refused(refusing):
    before = len(refusing.get("/v1/documents").json()["data"])
    sent = httpx.post(
        refusing.url + "/v1/documents", files={"file": ("n.txt", b"Ten mules.")}, data={"store": "false"}
    )
    assert (sent.status_code, sent.json()["error"]["param"]) == (400, "store")
    assert len(refusing.get("/v1/documents").json()["data"]) == before


def test_text_is_read_whatever_its_name_ends_with(refusing):
    data = base64.b64encode(b"%PDF or not, nine mules.").decode()
    for body in (
        {"file_data": data, "name": "t.exe"},
        {"text": "%PDF-1.7 begins a PDF file.", "name": "x.pdf"},
    ):
        added = refusing.post("/v1/documents", body).json()
        assert added["name"] == body["name"] and added["pages"] == 1


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "file"}, "has no file"),
        ({"type": "file", "file": {"filename": "x"}}, "file_data of a document is missing"),
        ({"type": "file", "file": {"file_id": "doc-0"}}, "There is no document 'doc-0' of yours"),
        ({"type": "file", "file": {"file_data": "x", "detail": "low"}}, "'detail' of a document is not supp"),
        ({"type": "document", "source": {"type": "url", "url": "http://x"}}, "source is of type 'url'"),
        ({"type": "document", "source": {"type": "text", "data": 3}}, "data of a document is no text"),
        ({"type": "document", "source": {"type": "base64", "data": "AAAA"}}, "looks like a binary file"),
    ],
)
def test_parts_that_are_refused(refusing, part, words):
    answer = ask(refusing, [part, question()])
    assert words in answer["error"]["message"], answer


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    with servers.scripted(engine=engine(tmp_path_factory.mktemp("refusing") / "s")) as live:
        yield live


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"--b\r\n\r\nx\r\n--b--", "has no name"),
        (b"x", "a boundary is missing"),
        (b'--b\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\nx\r\n--b--\r\n', "'f', f is a file" ),
    ],
)  # fmt: skip
def test_forms_that_are_none(refusing, body, words):
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = httpx.post(refusing.url + "/v1/documents", content=body, headers=headers)
    assert answer.status_code == 400
    assert words.rpartition(", ")[2] in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["Maße & Gewichte.txt", 'a "b".txt', "x;y=z.txt"])
def test_forms_carry_any_name_and_bytes(refusing, name):
    data = b"Nine mules.\r\n--b\r\n\r\n--\n" * 3 + bytes([0xC3, 0x9F])
    sent = httpx.post(refusing.url + "/v1/documents", files={"file": (name, data)}, data={"pin": "false"})
    assert sent.json()["name"].replace("%22", '"') == name, sent.text
    shown = refusing.get(f"/v1/documents/{sent.json()['id']}").json()
    assert shown["page_map"] == [{"page": 1, "start": 0, "end": len(data.decode().replace("\r\n", "\n"))}]


def test_web_pages_may_not_send_forms(refusing):
    form = {"files": {"file": ("x.txt", b"x")}, "headers": {"origin": "https://evil.example"}}
    answer = httpx.post(refusing.url + "/v1/documents", **form)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin"


def test_a_server_without_a_store(tmp_path):
    with servers.scripted(engine=engine(None)) as live:
        for answer in (live.post("/v1/documents", {"text": TEXT}), live.get("/v1/documents")):
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_store"
        part = {"type": "document", "source": {"type": "text", "data": TEXT}}
        assert ask(live, [part, question("[[Nine.]]")])["choices"][0]["message"]["content"] == "Nine"
        assert ask(live, [by_id("doc-1"), question()])["error"]["code"] == "no_store"


def test_what_is_pinned_is_never_evicted(tmp_path):
    """A store with room for a few documents: the pinned one stays, others come and go, and what cannot fit is
    refused with both numbers."""
    with servers.scripted(engine=engine(tmp_path / "s", disk=16 * MIB)) as live:
        disk = live.service.session.engine.store.lower.disk
        disk.quota = quota = 6 * MIB
        pinned = live.post("/v1/documents", {"name": "a.txt", "text": TEXT, "pin": True}).json()
        size = pinned["bytes"]["disk"]
        others = []
        for number in range(quota // size + 1):
            text = f"{number}: " + "The inn has two stables. " * 60
            others.append(live.post("/v1/documents", {"text": text}).json())
            assert others[-1]["bytes"]["disk"] > 0
        left = {d["id"]: d["bytes"]["disk"] for d in live.get("/v1/documents").json()["data"]}
        assert left[pinned["id"]] == size
        assert any(left.get(other["id"], 0) < other["bytes"]["disk"] for other in others), (
            "something had to go"
        )
        assert disk.usage()["bytes"] + disk.usage()["index_bytes"] <= quota * 1.01
        share = disk.quota // 50
        new = NewDocument(
            root_of(disk, 1, ""), owner_of(disk, ""), "big", "é" * share, (), b"abcd" * (share // 4)
        )
        with pytest.raises(DoesNotFitError) as caught:
            add_document(disk, 1, new)
        assert caught.value.asked > caught.value.available == share
        assert find_document(disk, None, "doc-x") is None
        assert json.loads(live.get("/health").text)["status"] == "ready"


def test_an_idle_server_forgets_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr("packhorse.server.documents.EXPIRY_S", 0.05)
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        kept = live.post("/v1/documents", {"text": "The inn has two stables. " * 30}).json()
        body = {"text": TEXT, "pin": True, "expires_after": {"anchor": "created_at", "seconds": 1}}
        gone = live.post("/v1/documents", body).json()
        ask(live, [by_id(gone["id"]), question()])

        def ids() -> list[str]:
            return [d["id"] for d in live.get("/v1/documents").json()["data"]]

        assert gone["id"] in ids()
        live.wait(lambda: ids() == [kept["id"]])
        disk = live.service.session.engine.store.lower.disk
        assert {p.document for p in disk.prefixes()} == {kept["id"], None}
        live.wait(lambda: disk.counters["expired_documents"] == 1)  # counted when its files are gone too
        assert live.get(f"/v1/documents/{kept['id']}").json()["bytes"]["disk"] > 0


@pytest.mark.parametrize("fault", ["quota", "free", "disk"])
def test_what_is_not_on_disk_is_not_acknowledged(tmp_path, monkeypatch, fault):
    """A quota smaller than one document, and a disk that is full: refused with the reason, and nothing is left."""
    with servers.scripted(engine=engine(tmp_path / "s", disk=16 * MIB)) as live:
        disk = live.service.session.engine.store.lower.disk

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            if fault == "disk":
                patch.setattr(disk.files, "write", full)
            elif fault == "free":
                patch.setattr(disk.files, "free_bytes", lambda _: disk.reserve)
            else:
                patch.setattr(disk, "quota", 400_000)
            answer = live.post("/v1/documents", {"text": TEXT, "pin": True})
        error = answer.json()["error"]
        opened = live.service.session.engine.store.stats.opened
        assert opened == (1 if fault == "disk" else 0), "what cannot be kept is refused before it is read"
        if fault != "disk":
            assert (answer.status_code, error["code"]) == (400, "does_not_fit")
            hint = "KiB. Give the store more" if fault == "quota" else "for 0 B. Make room on the disk of"
            assert "The document takes 1." in error["message"] and hint in error["message"]
        else:
            assert answer.status_code == 500 and "No space left on device" in error["message"]
        assert live.get("/v1/documents").json()["data"] == []
        assert list((tmp_path / "s" / "models").glob("*/*")) == []
        answer = live.post("/v1/documents", {"text": TEXT, "pin": True})
        assert answer.status_code == 200 and answer.json()["bytes"]["disk"] > 100_000


def test_damage_is_read_again_and_no_trouble(tmp_path):
    """To the file written last, whose row's number comes again."""
    with servers.scripted(engine=engine(tmp_path / "s"), path=servers.folder("qwen3")) as live:
        first = live.post("/v1/documents", {"text": TEXT}).json()
    with sqlite3.connect(tmp_path / "s" / "index.sqlite") as index:
        [(name,)] = index.execute("SELECT file FROM records ORDER BY id DESC LIMIT 1")
    [path] = (tmp_path / "s").rglob(f"{name}.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-8] + bytes(b ^ 1 for b in data[-8:]))
    with servers.scripted(engine=engine(tmp_path / "s"), path=servers.folder("qwen3")) as live:
        again = live.post("/v1/documents", {"text": TEXT})
        assert again.status_code == 200 and again.json()["bytes"]["disk"] == first["bytes"]["disk"]
        assert live.get("/health").json()["status"] == "ready"
        assert live.service.session.engine.lost_records == {"checksum": 1}


def test_another_process_finds_it(tmp_path, capsys):
    """A server and `ask` over one store at the same time, each with what the other has read."""
    (tmp_path / "hut.txt").write_text(TEXT)
    (tmp_path / "inn.txt").write_text(TEXT.replace("hut", "inn"))
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        live.post("/v1/documents", {"name": "hut.txt", "text": TEXT})
        for name, reused in (("hut.txt", True), ("inn.txt", False)):
            args = [
                "--exact",
                "--threads",
                "1",
                "--context",
                "4096",
                "--store",
                str(tmp_path / "s"),
                "--max-tokens",
                "2",
            ]
            assert (
                cli.run(["ask", str(servers.folder()), *args, "--document", str(tmp_path / name), "Who?"])
                == 0
            )
            assert ("reused 0," not in capsys.readouterr().err) is reused
        listed = {d["name"]: d["id"] for d in live.get("/v1/documents").json()["data"]}
        assert set(listed) == {"hut.txt", "inn.txt"}
        assert cached(ask(live, [by_id(listed["inn.txt"]), question()])) > 1400


def test_questions_that_begin_with_blanks(tmp_path):
    """A document that ends just at a page's end, read by a tokenizer that joins its end with what follows."""
    with servers.scripted(engine=engine(tmp_path / "s")) as live:
        session = live.service.session
        head = len("<|im_start|>user\nDocument d.txt:\n\n") - len("<|im_start|>") + 1
        for extra in range(3):  # the blank line behind it is at a page's end, within it, and behind it
            text = ("The hut has nine mules. " * 40)[: 15 * 64 - head - extra - 1] + "x"
            reading = read_as_prompt(Document("d.txt", text, ()), session.tokenizer, session.template, {})
            assert reading.length == 15 * 64 - extra and reading.marks[:2] == (
                reading.length,
                reading.length + 2,
            )
            added = live.post("/v1/documents", {"name": "d.txt", "text": text}).json()
            assert (
                cached(ask(live, [by_id(added["id"]), question("\n\nHow many?")]))
                >= reading.length // 64 * 64
            )


@pytest.mark.network
def test_a_real_tokenizer(tmp_path):
    model = read_model(smollm2())
    tokenizer = Tokenizer.load(model)
    template = ChatTemplate.load(model, tokenizer, None)
    for end in ("mules.", "mules", "mules?!", "mules)", "mules\n.", "9"):
        document = Document("d.txt", f"The hut has nine {end}\n", ())
        reading = read_as_prompt(document, tokenizer, template, {})
        for asked in ("Who?", "\n\nWho?", " Who?", "\tWho?", ".", "\n"):
            parts = [{"type": "text", "text": text} for text in (document_text(document), asked)]
            ids = tokenizer.encode(template.render([{"role": "user", "content": parts}]), special=False)
            assert tuple(ids[: reading.length]) == reading.token_ids[: reading.length], (end, asked)
        assert len(tokenizer.decode(reading.token_ids[reading.length :])) < len(end) + 20
