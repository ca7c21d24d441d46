"""Settings of a server, and the one file of a host that holds them with settings for each model.

    [server]                     # fields of ServerConfig
    port = 8000
    [engine]                     # fields of EngineConfig, for every model
    sequences = 4
    [models."hf:org/name"]       # the model as it is named on the command line
    name = "short-name"          # what clients call it
    context = 131072             # fields of EngineConfig
    chat_template = "file.jinja"
    max_tokens = 2048            # where a request does not say
    sampling = {temperature = 0.7, top_p = 0.8}
    options = {enable_thinking = false}

Options of the command line win over the model's section, that over [engine].
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from packhorse.core.config import EngineConfig, check_least
from packhorse.core.errors import UsageError
from packhorse.core.types import SamplingParams
from packhorse.core.units import MIB, parse_bytes

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SIZES = {"ram", "disk", "vram", "body_limit", "document_limit"}
SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
}  # fmt: skip


@dataclass(frozen=True)
class ServerConfig:
    """How the server listens and what it lets in. Raises UsageError where values contradict each other."""

    host: str = "127.0.0.1"
    """Address to listen at. Any but this machine's own needs a key file."""
    port: int = 8000
    """0 takes a free one and says which."""
    api_key_file: Path | None = None
    """Bearer keys (server/keys.py). None: no key is asked for."""
    queue: int = 64
    """Requests that may wait beside those that run; more get 429."""
    body_limit: int = 8 * MIB
    """Bytes of a request's body at most."""
    document_limit: int = 64 * MIB
    """The same where it brings a document to POST /v1/documents."""
    body_timeout: float = 60.0
    """Seconds in which a body must arrive."""
    header_timeout: float = 15.0
    """Seconds in which the first line and the headers must arrive."""
    keep_alive: float = 10.0
    """Seconds without news after which a sign of life is sent."""
    stall: float = 120.0
    """Seconds after which a client that takes nothing of its answer is given up."""
    grace: float = 10.0
    """Seconds that running answers have to end when the server is stopped."""
    cors: tuple[str, ...] = ()
    """Origins of web pages that may call. None by default."""
    shared_store: bool = False
    """Keys find what was read for other keys too. Else each key has its own."""
    log_contents: bool = False
    """Prompts and answers go into the log too."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"The port is {self.port}.", hint="Give one from 0 to 65535.")
        check_least(self, {"queue": 0})
        limits = ("body_limit", "document_limit", "body_timeout", "header_timeout")
        for name in (*limits, "keep_alive", "stall", "grace"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}.", hint="Give a number above 0.")
        if self.host not in LOOPBACK and self.api_key_file is None:
            raise UsageError(
                f"The server would listen at {self.host}, where others reach it, without asking for a key.",
                hint="Give --api-key-file FILE, or listen at 127.0.0.1.",
            )


@dataclass(frozen=True)
class ModelConfig:
    """Settings of one model. name: what clients call it (None: its own). The rest is for requests that do not
    say."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    name: str | None = None
    chat_template: Path | None = None
    max_tokens: int = 4096
    sampling: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def load_config(
    path: Path | None, model: str, server: Mapping[str, Any], model_options: Mapping[str, Any]
) -> tuple[ServerConfig, ModelConfig]:
    """The settings of a server for `model`: file, then what the command line gave (None: not given).

    Raises UsageError for a file that cannot be read, for unknown names and for values of the wrong type.
    """
    document = _read(path) if path is not None else {}
    unknown = set(document) - {"server", "engine", "models"}
    if unknown:
        raise UsageError(f"{path}: unknown section {sorted(unknown)[0]!r}.", hint=_HINT)
    base = path.parent if path is not None else Path()
    server_fields = _section(document.get("server", {}), "server", {f.name for f in fields(ServerConfig)})
    server_fields |= {k: v for k, v in server.items() if v is not None}
    engine_names = {f.name for f in fields(EngineConfig)}
    own_names = {f.name for f in fields(ModelConfig)} - {"engine"}
    merged = _section(document.get("engine", {}), "engine", engine_names)
    models = document.get("models", {})
    section = models.get(model, {}) if isinstance(models, dict) else None
    merged |= _section(section, f'models."{model}"', engine_names | own_names)
    merged |= {k: v for k, v in model_options.items() if v is not None}
    _check_types(server_fields, ServerConfig)
    _check_types(merged, EngineConfig, ModelConfig)
    own = {k: merged.pop(k) for k in own_names if k in merged}
    if own.get("chat_template") is not None:
        own["chat_template"] = base / own["chat_template"]
    if server_fields.get("api_key_file") is not None:
        server_fields["api_key_file"] = base / server_fields["api_key_file"]
    for values in (server_fields, merged):
        values |= {k: parse_bytes(v) for k, v in values.items() if k in SIZES and isinstance(v, str)}
    if merged.get("store") is not None:
        merged["store"] = base / merged["store"]
    if "cors" in server_fields:
        server_fields["cors"] = tuple(server_fields["cors"])
    _check_defaults(own)
    return ServerConfig(**server_fields), ModelConfig(engine=EngineConfig(**merged), **own)


_HINT = "docs/server.md lists the settings."


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"The configuration {path} cannot be read: {error}.", hint=_HINT) from error


def _section(section: Any, name: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(section, dict):
        raise UsageError(f"[{name}] is not a section.", hint=_HINT)
    unknown = sorted(set(section) - known)
    if unknown:
        hint = f"It knows {', '.join(sorted(known))}."
        raise UsageError(f"[{name}] has no setting {unknown[0]!r}.", hint=hint)
    return dict(section)


def _check_types(values: Mapping[str, Any], *kinds: type) -> None:
    """Raises UsageError where a value is not of its field's type, as JSON has it; sizes may be words."""
    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    for name, value in values.items():
        if not (name in SIZES and isinstance(value, str)):
            try:
                TypeAdapter(hints[name]).validate_json(json.dumps(value, default=str), strict=True)
            except ValidationError as error:
                wrong = error.errors()[0]["msg"]
                raise UsageError(f"The setting {name} is {value!r}: {wrong}.", hint=_HINT) from error


def _check_defaults(own: Mapping[str, Any]) -> None:
    sampling = own.get("sampling", {})
    if not isinstance(sampling, dict) or set(sampling) - SAMPLING:
        raise UsageError("sampling has an unknown setting.", hint=f"It knows {', '.join(sorted(SAMPLING))}.")
    SamplingParams(**sampling)
    max_tokens = own.get("max_tokens", 1)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens!r}.", hint="Give a number from 1 on.")
