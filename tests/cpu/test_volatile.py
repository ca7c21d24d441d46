"""Lines that change at the head of prompts: recognised, reported, counted, and named as the cause of a miss."""

import json
import re

import pytest
from test_durable_cli import FIXED, cache

import servers
from chats import PLAIN, shared_folder
from packhorse.cli import main as cli
from packhorse.core.config import EngineConfig
from packhorse.text.volatile import HEAD_CHARS, Volatile, find_volatile, volatile_kind

CHANGING = {
    "billing": [
        "x-anthropic-billing-header: cc_version=2.1.7; cc_entrypoint=cli; cch=1a2b3;",
        "Billing: 0.31 USD",
    ],
    "clock": [
        "Current time: 2026-11-30 03:25:11 UTC",
        "It is now 14:05 in Berlin.",
        "The local time is 3:25 PM",
        "2026-11-30T03:25:11Z",
        "timestamp=2026-11-30T03:25",
    ],
    "date": [
        "Today's date is 2026-11-30.",
        "Today Date: 26 Jul 2024",
        "The current date is November 30, 2026.",
        "  Today's date: Mon Nov 30, 2026",
        "Date: 30.11.2026",
    ],
    "id": ["Session ID: 5f1c2d3e-aaaa-bbbb", "request_id=req_011CSHoEeqs5C35K2UUq"],
}
STAYING = [
    "You are a helpful assistant.",
    "The lease of 3 March 2024 is current.",
    "Supper is at seven, breakfast at 7:30.",
    "Date of the contract and its term",
    "Cutting Knowledge Date: December 2023",
    "Clause 12.3.2024 of the agreement",
    "Always give the date in the form 2024-01-31.",
    "Ask for the session id first.",
    "The billing department pays the freight.",
]


@pytest.mark.parametrize(("kind", "line"), [(k, line) for k, lines in CHANGING.items() for line in lines])
def test_lines_that_change(kind, line):
    assert volatile_kind(line) == kind


@pytest.mark.parametrize("line", STAYING)
def test_lines_that_stay(line):
    assert volatile_kind(line) is None


def test_where_they_are():
    prompt = "You are Ann.\nToday's date is 2026-11-30.\n\nCurrent time: 10:00\n" + "x" * HEAD_CHARS
    prompt += "\nCurrent time: 10:00"
    found = find_volatile(prompt)
    assert found == [
        Volatile("date", 13, "Today's date is 2026-11-30."),
        Volatile("clock", 42, "Current time: 10:00"),
    ]
    assert all(prompt[v.position :].startswith(v.text) for v in found)


def test_a_server_reports_and_counts_them():
    with servers.scripted(engine=EngineConfig(context=2048, sequences=2, threads=1)) as live:
        system = {"role": "system", "content": "Current time: 10:00\nBe brief."}
        chat = [system, {"role": "user", "content": "Now 11:00? [[Nine.]]"}]
        told = live.chat("", messages=chat).json()["packhorse"]["volatile"]
        assert told[0]["kind"] == "clock" and told[0]["text"] == "Current time: 10:00"
        assert told[0]["position"] == len("<|im_start|>system\n")
        plain = live.chat("How many? [[Nine.]]").json()
        assert "packhorse" not in plain
        counted = re.findall(r'packhorse_volatile_lines_total{kind="(\w+)"} (\S+)', live.get("/metrics").text)
        assert counted == [("clock", "2.0")]


def test_cache_why_names_the_cause(tmp_path, capsys):
    store, model = tmp_path / "s", str(shared_folder("qwen3", PLAIN))
    rules = "You are Ann.\nCurrent time: 10:00\n" + "Look before you leap. " * 30
    assert cli.run(["ask", model, *FIXED, "--store", str(store), "--system", rules, "Who?"]) == 0
    capsys.readouterr()
    request = tmp_path / "request.json"

    def why(system: str, user: str) -> dict:
        body = {
            "model": "x",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        }
        request.write_text(json.dumps(body))
        return cache(capsys, "why", model, "--request", request, "--store", store)

    found = why(rules.replace("10:00", "10:01"), "Who?")
    too_early = ", and nothing is reused: no page of 64 tokens agrees"
    assert found["reason"] == "a line that changes each time (clock)" + too_early
    head = "<|im_start|>system\nYou are Ann.\n"
    assert (
        found["position"]
        == found["agreed_tokens"] + len("<|im_start|>") - 1
        == len(head + "Current time: 10:0")
    )
    assert found["asked_text"].startswith("1\nLook") and found["stored_text"].startswith("0\nLook")
    assert found["volatile"] == [f"clock at {len(head)}: Current time: 10:01"]
    found = why(rules, "What?")
    assert found["reason"] == "all that is stored agrees" and found["agreed_tokens"] == found["stored_tokens"]
    found = why(rules.replace("leap. Look", "leap. Think", 1), "Who?")
    assert found["reason"] == "the texts differ" + too_early and found["asked_text"].startswith(
        "Think before"
    )
    for name, body in (("no.json", "[]"), ("bad.json", "{"), ("empty.json", '{"messages": []}')):
        (tmp_path / name).write_text(body)
        assert cli.run(["cache", "why", model, "--request", str(tmp_path / name), "--store", str(store)]) == 4
        said = capsys.readouterr().err
        assert "is no chat request: " in said and "Expecting" not in said and "attribute" not in said
    assert cli.run(["cache", "why", model, "--request", str(tmp_path / "none"), "--store", str(store)]) == 4
    assert f"{tmp_path / 'none'} cannot be read: No such file" in capsys.readouterr().err
    hut = tmp_path / "hut.txt"
    hut.write_text("The hut has nine mules and one warden. " * 12)
    assert cli.run(["ask", model, *FIXED, "--store", str(store), "--document", str(hut), "How many?"]) == 0
    capsys.readouterr()
    [document] = cache(capsys, "ls", "--store", store)["documents"]
    for name, code in ((document["id"], 0), ("doc-0", 2)):
        part = {"type": "file", "file": {"file_id": name}}
        asked = [part, {"type": "text", "text": "Answer this question from the document above: How many?"}]
        request.write_text(json.dumps({"messages": [{"role": "user", "content": asked}]}))
        args = ["cache", "why", model, "--request", str(request), "--store", str(store), "--json"]
        assert cli.run(args) == code
        told = json.loads(capsys.readouterr().out)
        if code:
            assert "has no document 'doc-0'" in told["error"]["reason"]
        else:
            assert told["reason"] == "all that is stored agrees" and told["label"] == "hut.txt"
            assert (told["for_a_key"], told["kv"]) == (False, "fp32")
    assert cli.run(["cache", "ls", "--request", str(request), "--store", str(store)]) == 2
    assert "for cache why alone" in capsys.readouterr().err
