"""The openai client against a live server: what people's tools do."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from pydantic import BaseModel

import oracle
import servers
from packhorse.core.config import EngineConfig

XML_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nChur\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"  # noqa: E501
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def live():
    with servers.scripted(engine=EngineConfig(context=4096, sequences=4, threads=1, dtype="fp32")) as server:
        yield server


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client, text, **options):
    messages = options.pop("messages", [{"role": "user", "content": text}])
    return client.chat.completions.create(model="tiny", messages=messages, temperature=0, **options)


def test_models(client):
    [model] = client.models.list().data
    assert model.id == "tiny" and model.context_length == 4096
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


def test_chat_and_usage(client):
    answer = ask(client, "[[Seven mules.]]")
    assert answer.choices[0].message.content == "Seven mules."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("Seven mules.") + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_second_turn_reads_only_what_is_new(client):
    messages = [{"role": "user", "content": "m" * 700 + "[[Yes.]]"}]
    first = ask(client, "", messages=messages)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And? [[No.]]"}]
    second = ask(client, "", messages=messages)
    assert second.choices[0].message.content == "No."
    assert second.usage.prompt_tokens_details.cached_tokens >= 700


def test_stream_is_the_whole_in_pieces(client):
    whole = ask(client, "[[A café, a 木.]]")
    chunks = list(ask(client, "[[A café, a 木.]]", stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "A café, a 木."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert not any(c.usage for c in chunks[:-1])
    assert len(chunks) > 10, "it came in pieces"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, stream):
    answer = ask(client, "[[one END two]]", stop=["END", "never"], stream=stream)
    if stream:
        chunks = list(answer)
        text, finish = (
            "".join(c.choices[0].delta.content or "" for c in chunks),
            chunks[-1].choices[0].finish_reason,
        )
    else:
        text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, finish) == ("one ", "stop")


def test_length_is_said(client):
    answer = ask(client, "[[one two three]]", max_tokens=5)
    assert answer.choices[0].message.content == "one t"
    assert answer.choices[0].finish_reason == "length"
    newer = ask(client, "[[one two three]]", max_completion_tokens=3)
    assert newer.choices[0].message.content == "one"


def test_seeds(client):
    def draw(seed):
        return client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x"}],
            temperature=1.5,
            seed=seed,
            max_tokens=12,
            n=2,
        )

    first, again, other = draw(5), draw(5), draw(900)
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in again.choices]
    assert texts[0] != texts[1], "answers of one call differ"
    assert texts != [c.message.content for c in other.choices]
    single = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], temperature=1.5, seed=6, max_tokens=12
    )
    assert single.choices[0].message.content == texts[1], "answer i has the seed plus i"


def test_n_reads_the_prompt_once(client):
    answer = ask(client, "q" * 500, n=3, max_tokens=4)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert len({c.message.content for c in answer.choices}) == 1
    assert answer.usage.completion_tokens == 12
    assert 500 < answer.usage.prompt_tokens < 600
    chunks = list(ask(client, "q" * 500, n=3, max_tokens=4, stream=True))
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert set(texts.values()) == {answer.choices[0].message.content}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client, stream):
    answer = ask(client, "hello", logprobs=True, top_logprobs=2, max_tokens=6, stream=stream)
    if stream:
        scores = [s for c in answer if c.choices[0].logprobs for s in c.choices[0].logprobs.content]
    else:
        scores = answer.choices[0].logprobs.content
    assert len(scores) == 6
    for score in scores:
        assert score.token == score.top_logprobs[0].token and len(score.top_logprobs) == 2
        assert score.logprob == score.top_logprobs[0].logprob >= score.top_logprobs[1].logprob
        assert bytes(score.bytes).decode("utf-8", "replace") == score.token
        assert sum(math.exp(t.logprob) for t in score.top_logprobs) <= 1


def test_logit_bias_and_penalties(client):
    token = servers.TOKENIZER.token_to_id("Z")
    assert ask(client, "x", logit_bias={token: 100}, max_tokens=4).choices[0].message.content == "ZZZZ"
    plain = ask(client, "x", max_tokens=24).choices[0].message.content
    spread = ask(client, "x", max_tokens=24, frequency_penalty=2.0, extra_body={"repetition_penalty": 1.3})
    assert len(set(spread.choices[0].message.content)) > len(set(plain)), "tokens repeat less"


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(client, stream):
    prompt = f"[[I look.\n{XML_CALL}]]"
    answer = ask(client, prompt, tools=TOOLS, stream=stream)
    if stream:
        chunks = list(answer)
        calls = [c for k in chunks for c in k.choices[0].delta.tool_calls or []]
        text = "".join(k.choices[0].delta.content or "" for k in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        message = answer.choices[0].message
        calls, text, finish = message.tool_calls, message.content, answer.choices[0].finish_reason
    [call] = calls
    assert call.function.name == "weather" and call.type == "function" and call.id
    assert json.loads(call.function.arguments) == {"city": "Chur", "days": 2}
    assert (text.strip(), finish) == ("I look.", "tool_calls")


@pytest.mark.parametrize(("parallel", "cities"), [(True, ["Chur", "Chur"]), (False, ["Chur"])])
def test_one_call_where_no_more_are_wanted(client, parallel, cities):
    prompt = f"[[{XML_CALL}\n{XML_CALL}]]"
    choice = ask(client, prompt, tools=TOOLS, parallel_tool_calls=parallel).choices[0]
    assert [json.loads(c.function.arguments)["city"] for c in choice.message.tool_calls] == cities
    assert choice.finish_reason == "tool_calls"


def test_a_conversation_with_tools(client):
    call = ask(client, f"[[{XML_CALL}]]", tools=TOOLS).choices[0].message
    messages = [
        {"role": "user", "content": "Weather?"},
        call.model_dump(),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "[[Sun.]]"},
    ]
    assert ask(client, "", messages=messages, tools=TOOLS).choices[0].message.content == "Sun."


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "stop"}), ({"type": "function", "function": {"name": "stop"}}, {"stop"})],
)
def test_tool_choice_forces_a_call(client, choice, names):
    """The scripted answer is no call at all: the grammar allows nothing else."""
    tools = [TOOLS[1], {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"sky": {"type": "string", "enum": ["blue", "grey"]}}, "required": ["sky"]}}}]  # fmt: skip  # noqa: E501
    answer = ask(client, "[[zzzzzz]]", tools=tools, tool_choice=choice).choices[0]
    [call] = answer.message.tool_calls
    assert call.function.name in names and isinstance(json.loads(call.function.arguments), dict)
    assert answer.finish_reason == "tool_calls"
    assert (
        ask(client, f"[[{XML_CALL}]]", tools=TOOLS, tool_choice="none").choices[0].message.tool_calls is None
    )


def test_strict_tools_hold_their_schema_where_a_call_begins(client):
    """The script begins a call and goes on with nonsense: before the call all is free, in it nothing is."""
    parameters = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}}}
    parameters |= {"required": ["days"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": parameters}}
    answer = ask(client, "[[I look. <tool_call>zzzzzzzzzzzz]]", tools=[tool]).choices[0]
    [call] = answer.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["days"] in range(10)
    assert answer.message.content == "I look. "
    assert ask(client, "[[No call.]]", tools=[tool]).choices[0].message.content == "No call."


def test_a_call_inside_a_thought_ends_it(client):
    answer = ask(client, f"[[hm\n{XML_CALL}]]", tools=TOOLS, extra_body={"enable_thinking": True}).choices[0]
    assert answer.message.reasoning_content == "hm"
    assert answer.message.tool_calls[0].function.name == "weather"


class Mule(BaseModel):
    name: str
    load: int


SCHEMA = {
    "type": "object",
    "properties": {
        "load": {"type": "integer", "minimum": 0, "maximum": 99},
        "sky": {"enum": ["blue", "grey"]},
    },
    "required": ["load", "sky"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize(
    "text", ["[[so</think>no JSON at all]]", '[[ok\n</think>\n\n{"load": 7, "sky": "grey"}]]']
)
def test_json_schema_after_thinking(client, think, text):
    form = {"type": "json_schema", "json_schema": {"name": "mule", "schema": SCHEMA, "strict": True}}
    body = {"enable_thinking": think}
    text = text if think else text.replace("so</think>", "").replace("ok\n</think>\n\n", "")
    answer = ask(client, text, response_format=form, extra_body=body).choices[0]
    document = json.loads(answer.message.content)
    assert set(document) == {"load", "sky"} and 0 <= document["load"] <= 99
    assert answer.finish_reason == "stop"
    if think:
        assert answer.message.reasoning_content in ("so", "ok"), "the thought is free"
    if "{" in text:
        assert document == {"load": 7, "sky": "grey"}


def test_parse_with_a_pydantic_model(client):
    answer = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": '[[{"name": "Ada", "load": 40}]]'}],
        response_format=Mule,
        temperature=0,
    )
    assert answer.choices[0].message.parsed == Mule(name="Ada", load=40)


def test_a_schema_that_cannot_be_kept_is_refused(client):
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object", "unevaluatedItems": 1}},
    }
    with pytest.raises(openai.BadRequestError, match="unevaluatedItems") as caught:
        ask(client, "x", response_format=form)
    assert caught.value.param == "response_format"


def test_reasoning_stands_apart(client):
    script = "[[Let me see.\n</think>\n\nForty-two.]]"
    answer = ask(client, script, extra_body={"enable_thinking": True}).choices[0].message
    assert (answer.reasoning_content, answer.content) == ("Let me see.", "Forty-two.")
    chunks = list(ask(client, script, extra_body={"enable_thinking": True}, stream=True))
    thought = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks)
    assert thought == "Let me see."
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Forty-two."
    low = ask(client, script, reasoning_effort="low", extra_body={"enable_thinking": True})
    assert low.choices[0].message.content == "Forty-two."


def test_a_thinking_budget_closes_the_thought(client):
    body = {"enable_thinking": True, "thinking_budget": 6}
    answer = ask(client, "[[abcdefghijkl]]", extra_body=body, max_tokens=60).choices[0]
    assert answer.message.reasoning_content == "abcdef"
    closing = len(servers.TOKENIZER.encode("\n</think>\n\n").ids)
    assert answer.message.content == "abcdefghijkl"[6 + closing :]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_late_system_messages_are_folded(client, role):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": role, "content": "Speak German."},
        {"role": "user", "content": "[[Ja.]]"},
    ]
    answer = ask(client, "", messages=messages)
    assert answer.choices[0].message.content == "Ja."
    assert answer.packhorse == {"folded_messages": [2]}
    first = ask(client, "", messages=[{"role": "developer", "content": "Be brief."}, messages[3]])
    assert first.choices[0].message.content == "Ja." and getattr(first, "packhorse", None) is None


def test_completions_with_echo_and_prompt_logprobs(client, live):
    prompt = "The pass is open."
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text == prompt and answer.usage.completion_tokens == 0
    assert choice.logprobs.tokens == list(prompt)
    assert choice.logprobs.token_logprobs[0] is None
    model = oracle.transformers.AutoModelForCausalLM.from_pretrained(servers.folder())
    ids = servers.TOKENIZER.encode(prompt).ids
    expected = oracle.oracle_logits(model, ids).log_softmax(1)
    for place, got in enumerate(choice.logprobs.token_logprobs[1:]):
        assert got == pytest.approx(float(expected[place, ids[place + 1]]), abs=1e-3)
    chunks = list(client.completions.create(
        model="tiny", prompt=prompt, max_tokens=3, echo=True, logprobs=0, temperature=0, stream=True
    ))  # fmt: skip
    tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens]
    assert "".join(tokens) == "".join(c.choices[0].text for c in chunks) and len(tokens) == len(prompt) + 3


def test_completions_of_several_prompts(client):
    ids = servers.TOKENIZER.encode("[[ids]] x").ids
    assert client.completions.create(model="tiny", prompt=ids).choices[0].text == "ids"
    answer = client.completions.create(model="tiny", prompt=["[[one]]", "[[two]]"], n=2, temperature=0)
    assert [c.text for c in answer.choices] == ["one", "one", "two", "two"]
    assert answer.usage.prompt_tokens == 14


def test_errors_have_types_fields_and_ids(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert unknown.value.code == "model_not_found" and unknown.value.request_id.startswith("req-")
    with pytest.raises(openai.BadRequestError, match="model is missing; 'tiny' is served") as missing:
        client.post("/chat/completions", body={"messages": []}, cast_to=object)
    assert missing.value.code == "missing" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], temperature=-1
        )
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match=r"4096 tokens.*5,\d\d\d") as long:
        ask(client, "x" * 5000, max_tokens=10)
    assert long.value.code == "context_length_exceeded"
    assert long.value.body["available"] == 4096 and long.value.body["asked"] > 5000
    with pytest.raises(openai.BadRequestError, match="image"):
        ask(
            client,
            "",
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        )


def test_truncation_says_what_was_left_out(client):
    messages = [{"role": "system", "content": "Keep this."}]
    for turn in range(5):
        messages += [
            {"role": "user", "content": f"{turn}" + "x" * 900},
            {"role": "assistant", "content": "ok"},
        ]
    messages.append({"role": "user", "content": "[[Last.]]"})
    with pytest.raises(openai.BadRequestError, match="truncation"):
        ask(client, "", messages=messages, max_tokens=20)
    answer = ask(client, "", messages=messages, max_tokens=20, extra_body={"truncation": "auto"})
    assert answer.choices[0].message.content == "Last."
    report = answer.packhorse["truncation"]
    assert report["left_out_messages"] == [1, 2], "the oldest turn, question and answer; system and last stay"
    assert report["prompt_tokens"] == answer.usage.prompt_tokens <= 4096 - 20
    assert report["prompt_tokens_before"] - report["prompt_tokens"] == report["left_out_tokens"]
    chunks = list(
        ask(client, "", messages=messages, max_tokens=20, stream=True, extra_body={"truncation": "auto"})
    )
    assert [c.packhorse["truncation"] for c in chunks if getattr(c, "packhorse", None)] == [report]
    with pytest.raises(openai.BadRequestError, match="never left out"):
        ask(client, "y" * 5000, max_tokens=20, extra_body={"truncation": "auto"})


def test_cancelling_a_stream_frees_everything(client, live):
    stream = ask(client, "never ends", stream=True, max_tokens=3000)
    for _ in range(5):
        next(stream)
    stream.close()
    live.wait_idle()


def test_sixteen_at_once_answer_as_one_at_a_time():
    """Exact mode: lengths from a word to half the window, more requests than places, streams and not."""
    prompts = [f"Prompt {i}: " + "the mule walks " * (i * i // 2) for i in range(16)]
    engine = EngineConfig(context=4096, sequences=4, threads=1, exact=True)
    with servers.scripted(engine=engine, path=servers.folder("llama")) as live, openai.OpenAI(
        base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=120
    ) as client:  # fmt: skip

        def answer(i: int) -> str:
            stream = ask(client, prompts[i], max_tokens=5, stream=bool(i % 2))
            if i % 2:
                return "".join(c.choices[0].delta.content or "" for c in stream)
            return stream.choices[0].message.content

        single = [answer(i) for i in range(16)]
        live.service.session.engine.store.clear()
        barrier = threading.Barrier(16)
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(lambda i: (barrier.wait(), answer(i))[1], range(16)))
        assert together == single
        assert len(set(single)) > 8, "the answers depend on their prompts"
        live.wait_idle()
