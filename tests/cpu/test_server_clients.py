"""Clients that people put in front: LangChain, LiteLLM, and the calls that Open WebUI makes.

LiteLLM brings 300 MB of its own, so it is no dependency of the tests: its test runs where it is installed.
"""

import json

import pytest

import servers
from packhorse.core.config import EngineConfig

CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nChur\n</parameter>\n</function>\n</tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def live():
    with servers.scripted(engine=EngineConfig(context=4096, sequences=4, threads=1, dtype="fp32")) as server:
        yield server


def test_langchain(live):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        model="tiny", base_url=live.url + "/v1", api_key="none", temperature=0, max_retries=0
    )
    answer = model.invoke("[[A mule.]]")
    assert answer.content == "A mule." and answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["finish_reason"] == "stop"
    assert "".join(chunk.content for chunk in model.stream("[[In pieces.]]")) == "In pieces."

    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    bound = model.bind_tools([weather])
    [call] = bound.invoke(f"[[{CALL}]]").tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Chur"})
    forced = model.bind_tools([weather], tool_choice="weather").invoke(f"[[{CALL}]]")
    assert forced.tool_calls[0]["args"] == {"city": "Chur"}
    structured = model.with_structured_output(
        {"title": "place", "description": "A place.", **PARAMETERS}, method="json_schema"
    )
    assert structured.invoke('[[{"city": "Chur"}]]') == {"city": "Chur"}
    by_call = model.with_structured_output(
        {"title": "weather", "description": "A place.", **PARAMETERS}, method="function_calling"
    )
    assert by_call.invoke(f"[[{CALL}]]") == {"city": "Chur"}
    assert len(model.batch([f"[[{i}]]" for i in range(6)])) == 6


def test_litellm(live):
    litellm = pytest.importorskip("litellm", reason="LiteLLM is not installed (300 MB)")
    options = {"model": "openai/tiny", "api_base": live.url + "/v1", "api_key": "none", "num_retries": 0}

    def ask(text: str, **more):
        return litellm.completion(messages=[{"role": "user", "content": text}], **options, **more)

    answer = ask("[[A mule.]]", temperature=0)
    assert answer.choices[0].message.content == "A mule." and answer.usage.completion_tokens == 8
    chunks = list(ask("[[In pieces.]]", stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "In pieces."
    assert any(getattr(c, "usage", None) for c in chunks)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    [call] = ask(f"[[{CALL}]]", tools=tools).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Chur"}
    thought = ask("[[hm\n</think>\n\nyes]]", extra_body={"enable_thinking": True}).choices[0].message
    assert (thought.reasoning_content, thought.content) == ("hm", "yes")
    with pytest.raises(litellm.ContextWindowExceededError):
        ask("x" * 6000)
    with pytest.raises(litellm.BadRequestError):
        ask("x", extra_body={"mirostat": 2})


TITLE = (
    "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n"
    '### Output:\nJSON format: { "title": "your title" }\n### Chat History:\n[[{"title": "Mules"}]]'
)
TAGS = '### Task:\nGenerate 1-3 broad tags.\nJSON format: { "tags": ["a"] }\n[[{"tags": ["travel"]}]]'


def test_open_webui(live):
    """Its list of models, a streamed answer, then a title and tags: what it sends after each answer."""
    [model] = live.get("/v1/models", headers={"origin": "http://127.0.0.1:8080"}).json()["data"]
    messages = [{"role": "user", "content": "Tell me of mules. [[They are strong.]]"}]
    events = live.stream(
        "/v1/chat/completions",
        {"model": model["id"], "messages": messages, "stream_options": {"include_usage": True}},
    )
    text = "".join(c["delta"].get("content") or "" for e in events[:-1] for c in e["choices"])
    assert text == "They are strong." and events[-2]["usage"]["completion_tokens"] == 17
    for prompt, key in ((TITLE, "title"), (TAGS, "tags")):
        document = {
            "model": model["id"],
            "messages": [{"role": "user", "content": prompt}],
            "stream": False,
            "max_completion_tokens": 1000,
            "metadata": {"task": key, "chat_id": "1"},
        }
        answer = live.post("/v1/chat/completions", document)
        assert answer.status_code == 200 and answer.headers["x-packhorse-ignored"] == "metadata"
        assert key in json.loads(answer.json()["choices"][0]["message"]["content"])
