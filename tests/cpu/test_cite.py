"""Quotes are looked for word for word, and what is not there is said to be not there."""

import itertools
import json

import pytest
from test_documents import write_pdf

import servers
from chats import PLAIN, script, shared_folder
from packhorse.cli import main as cli
from packhorse.core.config import EngineConfig
from packhorse.text.cite import CITE_REQUEST, Citation, check_quotes, find_quotes
from packhorse.text.documents import Document, Page

TEXT = "The hut has nine\nmules. Snow falls.\n\nThe warden is Marta. Snow falls.\n\nSupper is at seven."
CUTS = (0, 37, 71, len(TEXT))
DOCUMENT = Document(
    "hut.pdf", TEXT, tuple(Page(n + 1, a, b) for n, (a, b) in enumerate(itertools.pairwise(CUTS)))
)


@pytest.mark.parametrize(
    ("quote", "pages"),
    [
        ("The hut has nine mules.", (1,)),
        ("Snow falls.", (1, 2)),
        ("Snow falls. The warden", (1, 2)),
        ("Supper is at seven.", (3,)),
        ("The hut has ten mules.", ()),
        ("the hut has nine mules.", ()),
        ("The hut has nine  mules. Snow falls. The warden is Marta. Snow falls. Supper", (1, 2, 3)),
        (".*", ()),
    ],
)
def test_quotes_are_checked(quote, pages):
    [found] = check_quotes(f'Nine.\nQUOTES\n- "{quote}"\n', [DOCUMENT])
    assert found == Citation(quote, "hut.pdf" if pages else None, pages, bool(pages))
    assert (f"page {pages[0]}" in str(found)) if pages else str(found).startswith("NOT in the documents")


@pytest.mark.parametrize(
    ("answer", "quotes"),
    [
        (
            'Nine.\n\n**QUOTES:**\n1. "One two."\n2) Three “four”\n\n* five six\n',
            ["One two.", "four", "five six"],
        ),
        ('He said "nine mules in all" and "no".', ["nine mules in all"]),
        ("Nothing is quoted.", []),
        ('QUOTES\n"a"\n"a"', ["a", "a"]),
        ('quotes\nold\nQuotes:\n""\n', []),
    ],
)
def test_quotes_are_found(answer, quotes):
    assert find_quotes(answer) == quotes


def test_which_document():
    other = Document("inn.txt", "The inn has two stables.", (Page(1, 0, 24),))
    found = check_quotes('QUOTES\n"two stables"\n"two stables"\n"nine mules"', [DOCUMENT, other])
    assert [(c.document, c.pages) for c in found] == [("inn.txt", (1,)), ("hut.pdf", (1,))]


def test_ask_cite(monkeypatch, capsys, tmp_path):
    pages = ["The hut has nine mules.", "The warden is Marta.", "Supper is at seven."]
    path = write_pdf(tmp_path / "hut.pdf", pages)
    script(monkeypatch, 'Marta.\nQUOTES\n"The warden is Marta."\n"The warden is Mar\x1bta."<|im_end|>')
    args = ["ask", str(shared_folder("qwen3", PLAIN)), "--threads", "1", "--document", str(path), "--cite"]
    assert cli.run([*args, "Who?"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Marta.\nQUOTES")
    lines = captured.err.splitlines()
    assert 'hut.pdf, page 2: "The warden is Marta."' in lines
    assert 'NOT in the documents: "The warden is Marta."' in lines, "a terminal is not steered"
    assert cli.run([*args, "--json", "Who?"]) == 0
    told = json.loads(capsys.readouterr().out)["citations"]
    assert [(c["pages"], c["verbatim"]) for c in told] == [([2], True), ([], False)]
    script(monkeypatch, "Marta.<|im_end|>")
    assert cli.run([*args, "Who?"]) == 0
    assert "The answer has no quotes" in capsys.readouterr().err
    assert cli.run(["ask", "x", "--cite", "Who?"]) == 2
    assert "there is none" in capsys.readouterr().err


def test_the_api_cites(tmp_path):
    data = {"type": "text", "data": TEXT}
    ask = {"type": "text", "text": '[[Marta.\nQUOTES\n"The warden is Marta."\n"Nobody knows."]]'}
    part = {"type": "document", "title": "hut.txt", "source": data}
    quoted = {"quote": "The warden is Marta.", "document": "hut.txt", "pages": [1], "verbatim": True}
    absent = {"quote": "Nobody knows.", "document": None, "pages": [], "verbatim": False}

    def body(part: dict, max_tokens: int = 64, **fields) -> dict:
        messages = [{"role": "user", "content": [part, ask]}]
        return {"messages": messages, "max_tokens": max_tokens, **fields}

    config = EngineConfig(context=4096, sequences=2, threads=1)
    with servers.scripted(engine=config) as live:
        asked = live.chat("", **body(part, citations=True, n=2)).json()
        told = asked["packhorse"]["citations"]
        assert told == [{"choice": i, **quote} for i in (0, 1) for quote in (quoted, absent)]
        wish = {**part, "citations": {"enabled": True}}
        streamed = live.stream("/v1/chat/completions", body(wish))
        [report] = [e["packhorse"] for e in streamed if "packhorse" in e]
        assert report["citations"] == told[:2]
        plain = live.chat("", **body(part, max_tokens=1)).json()
        assert "packhorse" not in plain
        more = asked["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"]
        assert more == len(CITE_REQUEST.encode())
        error = live.chat("How many?", citations=True).json()["error"]
        assert error["param"] == "citations" and "needs a document" in error["message"]
