"""A server that starts anew over a store: the first token after the demo's document in a twentieth of the time.

.venv/bin/python -m pytest -m slow tests/slow/test_durable_restart.py -s
"""

import importlib.resources
import time
from pathlib import Path

import httpx
import psutil
import pytest

import servers
from smollm2 import smollm2


def ask(live: servers.Live, question: str) -> tuple[int, float, float]:
    """Tokens read anew; seconds of the processor, and of the clock, from the call to an answer of one token."""
    text = importlib.resources.files("packhorse.text").joinpath("data/demo.md").read_text()
    model, process = live.get("/v1/models").json()["data"][0]["id"], psutil.Process(live.pid)
    document = {"type": "document", "title": "demo.md", "source": {"type": "text", "data": text}}
    messages = [{"role": "user", "content": [document, {"type": "text", "text": question}]}]
    body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
    before, began = process.cpu_times(), time.monotonic()
    usage = httpx.post(live.url + "/v1/chat/completions", json=body, timeout=600).json()["usage"]
    took, after = time.monotonic() - began, process.cpu_times()
    read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    return read, after.user + after.system - before.user - before.system, took


@pytest.mark.slow
@pytest.mark.network
def test_a_new_process_answers_in_a_twentieth_of_the_time(tmp_path: Path) -> None:
    """By the processor's time, which other work on the machine changes least. Another question has up to 127 tokens to
    read, and each costs more than one of the document's: it sees all of these."""
    options, found = ("--store", str(tmp_path / "s"), "--context", "8192"), []
    for question in ("Who leads the mules?", "Who leads the mules?", "Which number has the hut?"):
        with servers.process(*options, path=smollm2()) as live:
            found.append(ask(live, question))
            print("{} tokens read, {:.2f} s of the processor, {:.2f} s".format(*found[-1]))
    (whole, cold, _), (tail, again, _), (other_tail, other, _) = found
    assert whole > 3800 and tail < 64 and other_tail < 128
    assert again < 0.03 * cold and other < 0.05 * cold
