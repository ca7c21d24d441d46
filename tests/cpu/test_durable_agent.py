"""An agent's loop, replayed: tools, edits of old results, a helper with a system prompt of its own, thoughts that
are dropped, and a restart. What was read is not read again."""

from random import Random

import pytest

import servers
from packhorse.core.config import EngineConfig
from packhorse.engine.session import Session

RULES = "".join(
    f"Rule {i}: before step {i} look at file {i * 7}.txt and say what is in it. " for i in range(60)
)
HELPER = "".join(f"You check claim {i} of the report against its source. " for i in range(60))


def recorded() -> list[tuple[str, list[dict]]]:
    """Who asks, and with which messages: 20 turns of the agent, and its helper after every fourth."""
    random = Random(7)
    agent = [{"role": "system", "content": RULES}, {"role": "user", "content": "Tidy the folder."}]
    helper = [{"role": "system", "content": HELPER}]
    calls: list[tuple[str, list[dict]]] = []
    for turn in range(20):
        calls.append(("agent", [dict(m) for m in agent]))
        call = {"function": {"name": "read_file", "arguments": {"path": f"{turn}.txt"}}}
        thought = f"I should look at file {turn} first."
        agent.append({"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]})
        words = " ".join(random.choice(["mule", "hut", "pass", "snow"]) for _ in range(20))
        agent.append({"role": "tool", "content": f"{turn}.txt holds: {words}"})
        if turn % 5 == 4:
            # The client shortens the result before the last, as agents do to save room.
            agent[-3] = {"role": "tool", "content": "(left out)"}
        if turn % 4 == 3:
            helper.append({"role": "user", "content": f"Is claim {turn} right?"})
            calls.append(("helper", [dict(m) for m in helper]))
            helper.append({"role": "assistant", "content": "It is."})
    return calls


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_an_agents_loop(tmp_path, family):
    config = EngineConfig(
        context=16_384,
        sequences=1,
        threads=1,
        dtype="fp32",
        store=tmp_path / "s",
        snapshots=24,
        kv_tokens=24_576,
    )
    calls, seen = recorded(), set()
    read = reused = 0
    session = Session.open(servers.folder(family, context=16_384), config)
    for number, (who, messages) in enumerate(calls):
        if number == len(calls) // 2:
            session.close()
            session = Session.open(servers.folder(family, context=16_384), config)
        usage = session.answer(messages, max_tokens=2).usage
        if who in seen:
            read += usage.prompt_len
            reused += usage.cached_len
        seen.add(who)
    assert session.close() == ""
    assert len(calls) == 25 and read > 100_000
    assert reused / read >= 0.95
