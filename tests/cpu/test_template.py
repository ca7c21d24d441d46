"""Chat templates: equal to transformers, bounded, refused with their own words; marks on real boundaries."""

import threading
import time
import tracemalloc
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from packhorse.core.errors import InvalidRequestError, TokenizerError
from packhorse.core.types import LayerKind
from packhorse.facts.model import ModelFacts, RopeFacts
from packhorse.text.template import MARKED_TURNS, ChatTemplate, mark_positions
from packhorse.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face'"
    " '<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The published templates' ways, in words of our own: bos, headers, trimmed content, a date.
LLAMA3_LIKE = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' ~ strftime_now('%Y') ~ '\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}
{%- endif %}
{{- system ~ '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('Only user, assistant and tool turns may follow, not ' ~ message.role) }}
    {%- endif %}
    {%- if loop.first and message.role != 'user' %}{{ raise_exception('A user must begin.') }}{% endif %}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' }}
    {{- message.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
# Reasoning of turns before the last question is dropped, so the history is rewritten.
QWEN35_LIKE = """
{%- macro text_of(content) %}{{- content if content is string else '' }}{%- endmacro %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == 'user' %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if ns.last < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = text_of(message.content) | trim %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content | default('') | trim %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last %}{{ '<think>\n' ~ thought ~ '\n</think>\n\n' }}{% endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n<function=' ~ call.function.name ~ '>\n' }}
            {%- for name, value in call.function.arguments | items %}
                {%- set value = value if value is string else value | tojson %}
                {{- '<parameter=' ~ name ~ '>\n' ~ value ~ '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role in ('system', 'user') %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' ~ content ~ '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('Unexpected message role: ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
        {%- if reasoning_effort is defined %}{{ '(' ~ reasoning_effort ~ ')' }}{% endif %}
    {%- endif %}
{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "smollm2": SMOLLM2, "llama3": LLAMA3_LIKE, "qwen3.5": QWEN35_LIKE}

USER = {"role": "user", "content": "  How high is the <hut> & why?\n"}
ANSWER = {"role": "assistant", "content": "2,140 m.", "reasoning_content": "The handbook says so."}
CHATS = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief. Ünïcode 漢字."}, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "And the mules?"}],
    "thought inside": [
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
        {"role": "user", "content": ""},
    ],
    "ends with answer": [USER, ANSWER],
    "none values": [USER, {"role": "assistant", "content": "x", "tool_calls": None, "name": None}],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "<b> & 'é'", "parameters": {"a": 1}}}
]
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], SPECIAL)


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CHATML, LLAMA3_LIKE, "The hut keeps twelve mules. " * 20], trainer)
    marks = [
        "<|bos|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    tokenizer.add_special_tokens(marks)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(backend) -> Tokenizer:
    return Tokenizer(backend, SPECIAL)


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_equals_transformers(backend, name):
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)
    ours = template(name)
    for messages in CHATS.values():
        for options in (
            {},
            {"add_generation_prompt": False},
            {"enable_thinking": False},
            {"enable_thinking": True, "reasoning_effort": "low"},
            {"tools": TOOLS},
        ):
            theirs = oracle.apply_chat_template(
                messages,
                chat_template=TEMPLATES[name],
                tokenize=False,
                **{"add_generation_prompt": True, **options},
            )
            assert ours.render(messages, **options) == theirs


def test_tool_calls_render():
    call = {"function": {"name": "weather", "arguments": {"place": "hut", "days": 2}}}
    text = template("qwen3.5").render(
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "snow"},
        ]
    )
    assert (
        "<function=weather>\n<parameter=place>\nhut\n</parameter>\n<parameter=days>\n2\n</parameter>" in text
    )
    assert "<tool_response>\nsnow\n</tool_response>" in text


def test_what_templates_may_use():
    for source, expected in [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% for m in 'abc' %}{% if m == 'b' %}{% continue %}{% endif %}{{ m }}{% endfor %}", "ac"),
        ("{% for m in 'abc' %}{% if m == 'b' %}{% break %}{% endif %}{{ m }}{% endfor %}", "a"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x * 2 ** 3 }}", "16"),
        ("{{ dict(a=1)['a'] ~ none ~ absent ~ 'b' }}", "1Noneb"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ 'ab' * 2 + 'c' }}", "ababc"),
        ("{{ '%-4s|%03d|%.2f' % ('a', 7, 1.5) }}", "a   |007|1.50"),
        ("{{ '%s and %s' | format('a', 'b') }}{{ '%(x)s' | format(x=1) }}", "a and b1"),
        ("{{ '{:>4}|{x:.1f}'.format('a', x=2) }}", "   a|2.0"),
        ("{{ '{a}'.format_map({'a': 1}) }}{{ ('<{}>' | safe).format('<') }}", "1<&lt;>"),
        ("{{ 'a' | center(3) }}{{ 'a\nb' | indent(2) }}{{ 'aXb' | replace('X', '--') }}", " a a\n  ba--b"),
        (
            "{{ ['a', 1, none] | join(', ') }}{{ [{'n': 1}, {'n': 2}] | join('-', attribute='n') }}",
            "a, 1, None1-2",
        ),
        ("{{ [1, 2] | map('string') | map('center', 3) | list }}", "[' 1 ', ' 2 ']"),
        ("{{ 'a'.ljust(2) + 'b'.rjust(2) + '1'.zfill(2) + '-'.join(['c', 'd']) }}", "a  b01c-d"),
        ("{{ [{'a': [1]}] | tojson(indent=1) }}", '[\n {\n  "a": [\n   1\n  ]\n }\n]'),
        (
            "{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2] | sum }}{{ messages | length }}",
            "[[1, 2], [3, 0]]31",
        ),
    ]:
        assert ChatTemplate(source).render([USER]) == expected


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "One. "}, {"type": "text", "text": "Two."}]
    whole = template("chatml").render([{"role": "user", "content": "One. Two."}])
    assert template("chatml").render([{"role": "user", "content": parts}]) == whole


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ([{"content": "x"}], "Message 0 has no role"),
        (["x"], "Message 0 has no role"),
        ([USER, {"role": 3, "content": "x"}], "Message 1 has no role"),
        ([{"role": "user", "content": 7}], "content is of type int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "image .*vision part is not loaded",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], "image .*vision part is not loaded"),
        ([{"role": "user", "content": [{"type": "video"}]}], "video .*vision part is not loaded"),
        ([{"role": "user", "content": [{"type": "nonsense"}]}], "type 'nonsense'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without text"),
        ([{"role": "user", "content": ["x"]}], "type None"),
    ],
)
def test_messages_of_another_shape(messages, words):
    with pytest.raises(InvalidRequestError, match=words):
        template("chatml").render(messages)


@pytest.mark.parametrize(
    ("name", "messages", "words"),
    [
        (
            "qwen3.5",
            [USER, {"role": "system", "content": "late"}],
            r"System message must be at the beginning\.",
        ),
        ("qwen3.5", [USER, {"role": "developer", "content": "x"}], "Unexpected message role: developer"),
        ("qwen3.5", [ANSWER], "No user query found"),
        ("llama3", [USER, {"role": "critic", "content": "x"}], "not critic"),
        ("llama3", [ANSWER], r"A user must begin\."),
        ("chatml", [{"role": "user"}], "content"),
    ],
)
def test_what_a_template_rejects_is_said_in_its_words(name, messages, words):
    with pytest.raises(InvalidRequestError, match=f"template rejects these messages: .*{words}") as raised:
        template(name).render(messages)
    assert "--chat-template" in raised.value.hint
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ dict.__globals__.x }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ '{0.__class__.__mro__}'.format(1) }}{{ ''.__class__.__base__ }}",
    ],
)
def test_templates_stay_in_their_sandbox(source):
    with pytest.raises(TokenizerError, match="template was stopped"):
        ChatTemplate(source).render([USER])


def test_a_stopped_template_has_changed_nothing():
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TokenizerError):
        ChatTemplate("{{ messages[0].update(role='system') }}").render(messages)
    assert messages == [{"role": "user", "content": "x"}]


DOUBLED = "{% set ns = namespace(x=%s) %}{% for i in range(200) %}{% set ns.x = ns.x %s ns.x %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(100000) %}{{ messages[0].content }}and so on and on{% endfor %}",
        "{% set x %}{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}{% endset %}",
        DOUBLED.replace("%s", "'ab'", 1).replace("%s", "~", 1),
        DOUBLED.replace("%s", "'ab'", 1).replace("%s", "+", 1),
        DOUBLED.replace("%s", "[1]", 1).replace("%s", "+", 1),
        DOUBLED.replace("%s", "3", 1).replace("%s", "*", 1),
        "{{ 'x' * 10 ** 12 }}",
        "{{ [0] * 10 ** 12 }}",
        "{{ 7 ** (10 ** 9) }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'x' | center(10 ** 14) }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
        "{% set ns.x = ns.x + ['x' * 900000] %}{% endfor %}",
    ],
)
def test_templates_end_in_time(source):
    start = time.perf_counter()
    with pytest.raises(TokenizerError, match="template was stopped"):
        ChatTemplate(source).render([USER])
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' | center(200000000) }}",
        "{{ range(99999) | map('center', 1000) | join }}",
        "{{ range(99999) | map('center', 1000) | list | length }}",
        "{{ range(99999) | join('x' * 1000) }}",
        "{{ ['x' * 900000] * 1000 }}",
        "{{ (['x' * 900000] * 1000) | join }}",
        "{{ (['x' * 900000] * 1000) | string | length }}",
        "{{ (['x' * 900000] * 1000) ~ '' }}",
        "{{ (['x' * 900000] * 1000) | tojson | length }}",
        "{{ [1] | tojson(indent=200000000) }}",
        "{{ ([[0] * 90000] * 1000) | sum(start=[]) | length }}",
        "{{ [1] | batch(100000000, 'x') | list | length }}",
        "{{ ('x' * 9000) | replace('x', 'y' * 9000) }}",
        "{{ 'x' | replace('x', ['y' * 900000] * 1000) }}",
        "{{ ('\n' * 9000) | indent(9000, blank=true) }}",
        "{{ ('x ' * 9000) | wordwrap(1, wrapstring='y' * 9000) }}",
        "{{ '%200000000d' % 1 }}",
        "{{ '%*d' % (200000000, 1) }}",
        "{{ '%.200000000f' % 1.5 }}",
        "{{ ('%(x)s' * 9000) % {'x': 'y' * 90000} }}",
        "{{ '%200000000d' | format(1) }}",
        "{{ '{:200000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 200000000) }}",
        "{{ '{a:200000000}'.format_map({'a': 1}) }}",
        "{{ ('{0}' * 9000).format('y' * 90000) }}",
        "{{ ('{:200000000}' | safe).format(1) }}",
        "{{ 'x'.ljust(200000000) }}",
        "{{ 'x'.rjust(200000000) }}",
        "{{ 'x'.center(200000000) }}",
        "{{ 'x'['center'](200000000) }}",
        "{{ 'x'.zfill(200000000) }}",
        "{{ 'x'.encode().zfill(200000000) }}",
        "{{ ('x'.encode() * 200000000) | length }}",
        "{{ (1).to_bytes(200000000, 'big') | length }}",
        "{{ '\t'.expandtabs(200000000) }}",
        "{{ ('x' * 9000).replace('x', 'y' * 90000) }}",
        "{{ ('x' * 9000).translate({120: 'y' * 90000}) }}",
        "{{ ('y' * 9000).join('x' * 9000) }}",
        "{{ strftime_now('%Y' * 900000) }}",
    ],
)
def test_nothing_large_is_built_before_it_is_refused(source):
    tracemalloc.start()
    try:
        with pytest.raises(TokenizerError, match="template was stopped"):
            ChatTemplate(source).render([USER])
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


def test_bounds_leave_room_for_long_chats():
    """A document of a million tokens, and two thousand turns."""
    document = "The mule carries the flour up to the hut. " * 100_000
    assert document.strip() in template("qwen3.5").render([{"role": "user", "content": document}])
    turns = [USER, {"role": "assistant", "content": "a"}] * 1000
    assert template("qwen3.5").render([*turns, USER]).count("<|im_start|>") == 2002


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if x %}", "does not compile: .*line 1"),
        ("\n\n{{ x | nosuchfilter }}", "does not compile: .*nosuchfilter.*line 3"),
        ("{% include 'other' %}", "other templates cannot be included"),
        ("{% import 'os' as os %}", "other templates cannot be included"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deep"),
    ],
)
def test_templates_that_do_not_compile(source, words):
    with pytest.raises(TokenizerError, match=words):
        ChatTemplate(source)


def make_facts(chat_template: str | None) -> ModelFacts:
    return ModelFacts(
        family="llama", name="tiny", path=Path("tiny"), container="config", vocab_size=1, hidden_size=1,
        layer_kinds=(LayerKind.FULL,), moe_layers=(False,), num_heads=1, num_kv_heads=1, head_dim=2,
        intermediate_size=1, rms_eps=1e-6, rope=RopeFacts(1e4, 2), context=8, tied=True,
        chat_template=chat_template,
    )  # fmt: skip


def test_load(tokenizer, tmp_path):
    own = ChatTemplate.load(make_facts(LLAMA3_LIKE), tokenizer)
    assert own.render([USER]).startswith("<|bos|><|start_header_id|>")
    file = tmp_path / "t.jinja"
    file.write_bytes("\ufeff{{ eos_token }}é{{ messages[0].content }}".encode())
    text = ChatTemplate.load(make_facts(None), tokenizer, file).render([USER])
    assert text == "<|im_end|>é" + USER["content"]
    file.write_text("{{ raise_exception('a system message first') }}")
    assert ChatTemplate.load(make_facts(None), tokenizer, file).source.startswith("{{ raise")
    file.write_text("# How to install\nAny question? Which number? {{ messages | length }}")
    with pytest.raises(TokenizerError, match=r"t\.jinja writes a prompt without the question"):
        ChatTemplate.load(make_facts(None), tokenizer, file)
    with pytest.raises(TokenizerError, match=r"tiny comes without a chat template.*--chat-template FILE"):
        ChatTemplate.load(make_facts(None), tokenizer)
    file.write_bytes(b"\xff\xfe")
    for bad in (file, tmp_path / "absent", tmp_path):
        with pytest.raises(TokenizerError, match="cannot be read"):
            ChatTemplate.load(make_facts(None), tokenizer, bad)


def test_threads_do_not_share_a_budget():
    shared = ChatTemplate("{% for i in range(40000) %}{% endfor %}x")
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(shared.render([USER]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["x"] * 4


# Marks ---------------------------------------------------------------------------------------------------


def text_up_to(tokenizer: Tokenizer, ids: list[int], mark: int) -> str:
    return tokenizer.decode(ids[:mark], skip_special=False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_are_where_turns_end(tokenizer, name):
    messages = [{"role": "system", "content": "Be brief."}, *CHATS["turns"]]
    ids, marks = mark_positions(template(name), tokenizer, messages)
    text = template(name).render(messages)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert ids == tokenizer.encode(text, special=False)
    assert list(marks) == sorted(set(marks)) and marks[0] > 0 and marks[-1] <= len(ids)
    reached = [text_up_to(tokenizer, ids, mark) for mark in marks]
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>\n"
    # With Qwen's template the answer's reasoning is gone from the history: a rewritten turn is no mark.
    assert len(reached) == {"qwen3.5": 2}.get(name, 4)
    assert all(part.endswith(end) for part in reached)


def test_marks_hold_in_the_next_turn(tokenizer):
    """The point of a mark: what a later chat says up to it is the same."""
    for name in TEMPLATES:
        first = [USER]
        ids, marks = mark_positions(template(name), tokenizer, first)
        later, _ = mark_positions(template(name), tokenizer, [*first, ANSWER, USER])
        assert marks
        assert later[: marks[-1]] == ids[: marks[-1]]


def test_each_document_of_a_message_ends_at_a_mark(tokenizer):
    documents = ["\n  # Hut\nTwelve mules.\n\n", "# Weather\nSnow in May.\n\n", "How many mules?  "]
    messages = [{"role": "user", "content": [{"type": "text", "text": text} for text in documents]}]
    for name in TEMPLATES:
        ids, marks = mark_positions(template(name), tokenizer, messages)
        reached = [text_up_to(tokenizer, ids, mark).rstrip() for mark in marks]
        assert any(text.endswith("Twelve mules.") for text in reached)
        assert any(text.endswith("Snow in May.") for text in reached)
        # Another question after the same documents keeps the marks of the documents.
        other = [{"role": "user", "content": [*messages[0]["content"][:2], {"type": "text", "text": "Why?"}]}]
        other_ids, other_marks = mark_positions(template(name), tokenizer, other)
        common = next(i for i, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b)
        shared = [mark for mark in set(marks) & set(other_marks) if mark <= common]
        assert any(text_up_to(tokenizer, ids, mark).rstrip().endswith("Snow in May.") for mark in shared)


def test_marks_tolerate_content_that_the_template_changes(tokenizer):
    loud = ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    parts = [{"type": "text", "text": "a hut"}, {"type": "text", "text": "a mule"}]
    ids, marks = mark_positions(loud, tokenizer, [{"role": "user", "content": parts}])
    assert marks == (len(ids),)
    empty, no_marks = mark_positions(ChatTemplate("{{ '' }}"), tokenizer, [USER])
    assert (empty, no_marks) == ([], ())


def test_only_last_turns_are_rendered_again(tokenizer, monkeypatch):
    chat = template("chatml")
    calls = []
    render = chat.render
    monkeypatch.setattr(chat, "render", lambda *a, **k: calls.append(1) or render(*a, **k))
    messages = [{"role": "user", "content": f"turn {i}"} for i in range(200)]
    _, marks = mark_positions(chat, tokenizer, messages)
    assert len(marks) == MARKED_TURNS + 1 == len(calls) - 1


def test_marks_pass_a_refusal_on(tokenizer):
    with pytest.raises(InvalidRequestError, match="A user must begin"):
        mark_positions(template("llama3"), tokenizer, [ANSWER])
