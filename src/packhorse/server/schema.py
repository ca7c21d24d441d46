"""What requests may hold, checked without coercion, and what answers look like (for the OpenAPI document).

A field that is known from OpenAI's API or from other servers and is not built is refused by name. Any other
unknown field is ignored, and listed in the header x-packhorse-ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from packhorse.server.errors import ApiError, bad_field

MAX_MESSAGES = 20_000
MAX_STOPS = 16
MAX_CHOICES = 128

NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "audio": (), "modalities": (["text"],), "prediction": (), "web_search_options": (), "functions": (),
    "function_call": (), "best_of": (1,), "suffix": ("",), "verbosity": (),
    "use_beam_search": (False,), "length_penalty": (1, 1.0), "early_stopping": (False,), "min_tokens": (0,),
    "bad_words": ([],), "logits_processors": (), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "structured_outputs": (), "grammar": (), "json_schema": (), "typical_p": (1, 1.0),
    "mirostat": (0,), "mirostat_tau": (), "mirostat_eta": (), "dry_multiplier": (0, 0.0), "dry_base": (),
    "xtc_probability": (0, 0.0), "xtc_threshold": (), "top_n_sigma": (), "dynatemp_range": (0, 0.0),
    "n_predict": (), "n_probs": (0,), "repeat_penalty": (), "thinking_token_budget": (),
    "reasoning_budget": (), "reasoning": (), "thinking": (), "prompt_embeds": (), "lora": (),
    "truncate_prompt_tokens": (), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "documents": (), "allowed_token_ids": (), 
    "return_token_ids": (False,), "extra_body": (),
}  # fmt: skip
"""Known fields that are not built, and the values with which they ask for nothing (null always does)."""

INSTEAD = {
    "functions": "tools", "function_call": "tool_choice", "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens", "n_probs": "top_logprobs", "guided_json": "response_format",
    "json_schema": "response_format", "structured_outputs": "response_format",
    "thinking_token_budget": "thinking_budget", "reasoning_budget": "thinking_budget",
    "thinking": "enable_thinking", "reasoning": "reasoning_effort",
    "truncate_prompt_tokens": "truncation", "extra_body": "its fields themselves",
}  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class Message(_Strict):
    """One message. content: text, or parts of type text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(None, max_length=MAX_CHOICES)
    tool_call_id: str | None = None


class Function(_Strict):
    """A function that the model may call. strict: a call follows the schema exactly."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(_Strict):
    """The name of a function."""

    name: str


class NamedTool(_Strict):
    """A tool by name."""

    type: Literal["function"]
    function: NamedFunction


class SchemaFormat(_Strict):
    """A JSON schema. Every answer follows it, strict or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """How the answer is to be written."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StreamOptions(_Strict):
    """include_usage: a last chunk with the counts."""

    include_usage: bool | None = None


Stop = Annotated[str, Field(min_length=1)]
Logprobs = Annotated[int, Field(ge=0, le=20)]


class _Sampling(_Strict):
    """What chats and completions have in common. store: false keeps nothing of the request."""

    model: str
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1e-3, le=100)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] | None = Field(None, max_length=MAX_STOPS)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    on_disconnect: Literal["cancel", "read_on"] | None = None
    store: bool | None = None


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_CHOICES)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    thinking_budget: int | None = Field(None, ge=0, le=2**31 - 1)
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    citations: bool | None = None


TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)]


class CompletionRequest(_Sampling):
    """POST /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    echo: bool | None = None
    logprobs: Logprobs | None = None


class TokenizeRequest(_Strict):
    """POST /v1/tokenize: a text, or a chat as its template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=MAX_CHOICES)
    add_special_tokens: bool | None = None


class ExpiresAfter(_Strict):
    """When a document is to be forgotten."""

    anchor: Literal["created_at"] | None = None
    seconds: int = Field(ge=1, le=2**31 - 1)


class DocumentRequest(_Strict):
    """POST /v1/documents: `text`, or `file_data`, a PDF file or a file of text in base64. pin: never evicted."""

    name: str | None = Field(None, max_length=1000)
    text: str | None = None
    file_data: str | None = None
    pin: bool | None = None
    expires_after: ExpiresAfter | None = None
    stream: bool | None = None
    model: str | None = None


T = TypeVar("T", bound=BaseModel)


def validate(kind: type[T], document: Mapping[str, Any]) -> tuple[T, list[str]]:
    """The request, and the fields of it that are ignored.

    Raises ApiError for the first field that is missing, unbuilt or of another type or range.
    """
    for name, empty in NOT_BUILT.items():
        if name in kind.model_fields or document.get(name) is None or document[name] in empty:
            continue
        instead = f"Use {INSTEAD[name]}." if name in INSTEAD else "Leave it out."
        raise bad_field(name, f"The field {name} is not supported.", instead, code="unsupported_field")
    try:
        request = kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        raise ApiError(400, first["type"], f"{param}: {first['msg']}.", param=param) from error
    return request, sorted(request.model_extra or {})


class TokensDetails(BaseModel):
    """cached_tokens: tokens of the prompt that were not read again."""

    cached_tokens: int


class UsageBody(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokensDetails


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: UsageBody


class ChatCompletion(_Answer):
    """Answer of /v1/chat/completions. packhorse: what was done with the messages (truncation, folding), and
    citations where they were asked for."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    packhorse: dict[str, Any] | None = None


class TextChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(_Answer):
    """Answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Tokens(BaseModel):
    """Answer of /v1/tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class DocumentBody(BaseModel):
    """A document of the store. tokens: of its text in a prompt. pages: of the source. bytes: of its KV pages and
    states by tier (device, host, disk). page_map: first character and end of each page in the text."""

    id: str
    object: Literal["document"]
    name: str
    created_at: int
    expires_at: int | None
    tokens: int
    pages: int
    empty_pages: list[int]
    pinned: bool
    bytes: dict[str, int]
    page_map: list[dict[str, int]] | None = None


class DocumentList(BaseModel):
    """Answer of GET /v1/documents, the last used first."""

    object: Literal["list"]
    data: list[DocumentBody]


class DeletedDocument(BaseModel):
    """Answer of DELETE /v1/documents/{id}. freed_bytes: on disk."""

    id: str
    object: Literal["document.deleted"]
    deleted: bool
    freed_bytes: int


class ModelBody(BaseModel):
    """One model. context_length: tokens that prompt and answer may have together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    max_model_len: int


class ModelList(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelBody]


class HealthBody(BaseModel):
    """Answer of /health."""

    status: Literal["loading", "ready", "degraded", "failed"]
    reason: str | None


class PlanBody(BaseModel):
    """Answer of /plan. bytes: by consumer, `planned` before loading, `allocated`, and in use (`used`); of a card as a
    whole by the driver's figure, under its `cap`."""

    context: int
    sequences: int
    device: str
    bytes: dict[str, dict[Literal["planned", "allocated", "used", "cap"], int]]
    process_resident_bytes: int


class ErrorObject(BaseModel):
    """What went wrong. request_id: to be found in the server's log."""

    model_config = ConfigDict(extra="allow")
    message: str
    type: str
    param: str | None
    code: str
    request_id: str


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorObject
