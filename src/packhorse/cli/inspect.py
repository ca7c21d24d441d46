"""packhorse inspect: what a model is, from its headers. Imports no torch."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from packhorse.cli.common import (
    CacheOption,
    JsonOption,
    ModelArgument,
    OfflineOption,
    find_model,
    print_json,
    title,
)
from packhorse.core.errors import PackhorseError
from packhorse.core.units import format_bytes
from packhorse.facts.model import ModelFacts
from packhorse.facts.packed import packed_matrices
from packhorse.facts.read import read_model
from packhorse.facts.weights import expected_params, weight_classes
from packhorse.plan.account import kv_token_bytes, snapshot_bytes
from packhorse.text.template import ChatTemplate
from packhorse.text.tokenizer import Tokenizer, needs_transformers

KV_CODEC = "bf16"


def command(
    model: ModelArgument, json: JsonOption = False, cache: CacheOption = None, offline: OfflineOption = False
) -> None:
    """Prints the facts as a table or as JSON. A broken tokenizer or template is one of the facts."""
    facts = read_model(find_model(model, cache, offline))
    described = {"model": model, **describe(facts)}
    if json:
        print_json(described)
    else:
        _print_table(title(model, facts), described)


def describe(facts: ModelFacts) -> dict[str, Any]:
    """The facts as a JSON-ready document. Bytes in bytes; per-token and per-sequence sizes in bf16. packed_bytes: what
    can stay packed, in the kernels' layout, by format and class."""
    formats: dict[str, int] = {}
    for tensor in facts.tensors.values():
        formats[tensor.format.name] = formats.get(tensor.format.name, 0) + tensor.num_bytes
    packed: dict[str, dict[str, int]] = {}
    for matrix in packed_matrices(facts):
        kinds = packed.setdefault(matrix.form.name, {})
        kinds[matrix.kind] = kinds.get(matrix.kind, 0) + matrix.num_bytes
    return {
        "name": facts.name,
        "path": str(facts.path),
        "container": facts.container,
        "family": facts.family,
        "parameters": sum(expected_params(facts).values()),
        "context": facts.context,
        "vocab_size": facts.vocab_size,
        "hidden_size": facts.hidden_size,
        "layers": {
            "total": facts.num_layers,
            "full_attention": facts.num_full_layers,
            "linear_attention": facts.num_linear_layers,
            "moe": sum(facts.moe_layers),
            "mtp": facts.num_mtp_layers,
        },
        "heads": {
            "query": facts.num_heads,
            "kv": facts.num_kv_heads,
            "head_dim": facts.head_dim,
            "output_gate": facts.attn_gate,
        },
        "delta_net": None if facts.delta is None else dataclasses.asdict(facts.delta),
        "experts": None if facts.moe is None else dataclasses.asdict(facts.moe),
        "intermediate_size": facts.intermediate_size,
        "rope": {
            "kind": facts.rope.kind,
            "theta": facts.rope.theta,
            "rotary_dim": facts.rope.rotary_dim,
            "factor": facts.rope.factor,
        },
        "tied_embeddings": facts.tied,
        "bos_id": facts.bos_id,
        "eos_ids": list(facts.eos_ids),
        "generation": dict(facts.generation),
        "tensors": len(facts.tensors),
        "tensor_bytes": facts.file_bytes,
        "bytes_by_class": weight_classes(facts),
        "bytes_by_format": dict(sorted(formats.items(), key=lambda item: -item[1])),
        "packed_bytes": packed,
        "kv_bytes_per_token": kv_token_bytes(facts, KV_CODEC),
        "state_bytes_per_sequence": snapshot_bytes(facts, KV_CODEC),
        **_text_part(facts),
        "notes": list(facts.notes),
    }


def _text_part(facts: ModelFacts) -> dict[str, Any]:
    """Tokenizer and chat template: their facts, or why they cannot be used."""
    if facts.container != "gguf" and needs_transformers(facts.path):
        # Converting older files imports torch: left to the commands that load the model.
        return {
            "tokenizer": {"files": "older formats, converted when the model is loaded"},
            "chat_template": {"present": facts.chat_template is not None},
        }
    try:
        tokenizer = Tokenizer.load(facts)
    except PackhorseError as error:
        return {"tokenizer": _problem(error), "chat_template": {"present": facts.chat_template is not None}}
    template: dict[str, Any] = {"present": facts.chat_template is not None}
    if facts.chat_template is not None:
        try:
            ChatTemplate.load(facts, tokenizer)
            template["characters"] = len(facts.chat_template)
        except PackhorseError as error:
            template |= _problem(error)
    return {
        "tokenizer": {"tokens": tokenizer.vocab_size, "special_tokens": tokenizer.special_tokens},
        "chat_template": template,
    }


def _problem(error: PackhorseError) -> dict[str, str]:
    return {"problem": error.reason, "hint": error.hint}


def _print_table(model: str, described: dict[str, Any]) -> None:
    """Label and text in two columns; long texts are wrapped on a terminal only."""
    rows = [("model", model), *_rows(described)]
    if not sys.stdout.isatty():
        for name, value in rows:
            print(f"{name:<13} {value}")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    Console().print(table)


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of each line for people, below the model's."""
    layers, heads = facts["layers"], facts["heads"]
    rows = [
        ("path", str(Path(facts["path"]))),
        ("family", f"{facts['family']} ({facts['container']})"),
        ("parameters", f"{facts['parameters']:,}"),
        ("context", f"{facts['context']:,} tokens"),
        ("layers", _layers_text(layers)),
        ("width", f"{facts['hidden_size']:,}, vocabulary {facts['vocab_size']:,}"),
        ("heads", f"{heads['query']} query, {heads['kv']} key/value, {heads['head_dim']} wide"),
    ]
    if facts["delta_net"]:
        delta = facts["delta_net"]
        rows.append(
            ("delta net", f"{delta['num_k_heads']} key and {delta['num_v_heads']} value heads, state "
             f"{delta['k_head_dim']} x {delta['v_head_dim']}")
        )  # fmt: skip
    if facts["experts"]:
        moe = facts["experts"]
        shared = f", a shared one of {moe['shared_dim']}" if moe["shared_dim"] else ""
        rows.append(
            ("experts", f"{moe['num_experts']}, {moe['top_k']} a token, {moe['expert_dim']} wide{shared}")
        )
    rope = facts["rope"]
    scaled = "" if rope["kind"] == "default" else f", {rope['kind']} x {rope['factor']:g}"
    rows.append(("rope", f"theta {rope['theta']:,.0f}, {rope['rotary_dim']} dims{scaled}"))
    rows.append(("weights", _bytes_text(facts["tensor_bytes"], facts["bytes_by_class"])))
    rows.append(("stored as", _bytes_text(None, facts["bytes_by_format"])))
    for form, kinds in facts["packed_bytes"].items():
        rows.append((f"packed {form}", _bytes_text(sum(kinds.values()), kinds)))
    rows.append(("KV", f"{format_bytes(facts['kv_bytes_per_token'])} a token in {KV_CODEC}"))
    if facts["state_bytes_per_sequence"]:
        rows.append(("state", f"{format_bytes(facts['state_bytes_per_sequence'])} a sequence"))
    rows.append(("tokenizer", _tokenizer_text(facts["tokenizer"])))
    template = facts["chat_template"]
    rows.append(
        ("chat template", template.get("problem") or ("present" if template["present"] else "missing"))
    )
    rows += [("note", text) for text in facts["notes"]]
    return rows


def _layers_text(layers: dict[str, int]) -> str:
    kinds = [f"{layers['full_attention']} full attention", f"{layers['linear_attention']} linear attention"]
    parts = [part for part in kinds if not part.startswith("0 ")]
    if layers["moe"]:
        parts.append(f"{layers['moe']} with experts")
    if layers["mtp"]:
        parts.append(f"{layers['mtp']} more for multi-token prediction")
    return f"{layers['total']}: {', '.join(parts)}"


def _bytes_text(total: int | None, parts: dict[str, int]) -> str:
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    if total is None:
        return listed or "no weights here"
    return f"{format_bytes(total)}: {listed}" if parts else "no weights here"


def _tokenizer_text(tokenizer: dict[str, Any]) -> str:
    if "tokens" in tokenizer:
        return f"{tokenizer['tokens']:,} tokens"
    return str(tokenizer.get("problem") or tokenizer["files"])
