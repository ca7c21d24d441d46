"""`read_model`: one description of a model, whatever files it comes in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packhorse.core.errors import CorruptFileError, RefusedError, TokenizerError, UnsupportedModelError
from packhorse.facts import names
from packhorse.facts.config_json import config_fields, quantization_fields
from packhorse.facts.fields import Fields, read_bytes, read_object, reading
from packhorse.facts.gguf_model import is_later_part, read_gguf, unused_note
from packhorse.facts.model import ModelFacts
from packhorse.facts.quantization import stored_matrices
from packhorse.facts.safetensors_header import PICKLES, read_folder

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_model(path: str | Path) -> ModelFacts:
    """What the model at `path` is: a folder with config.json, a GGUF file, or a folder with one GGUF file.

    Reads headers only, never weights. Raises RefusedError and its kinds (CorruptFileError,
    UnsupportedModelError, TokenizerError), each with what to change.
    """
    path = Path(path).expanduser()
    with reading(path):
        if path.is_dir():
            return _read_folder(path)
        if path.is_file():
            return _read_file(path)
    hint = "Give a folder with config.json, or a GGUF file."
    raise RefusedError(f"There is no model at {path}.", hint=hint, path=str(path))


def _read_file(file: Path) -> ModelFacts:
    if file.suffix in PICKLES:
        raise UnsupportedModelError(
            f"{file} is a pickle file, which can run any code when it is opened. Packhorse does not open it.",
            hint="Use the model's safetensors files or a GGUF file.",
        )
    if file.suffix in (".safetensors", ".json"):
        raise RefusedError(f"{file} is one file of a model.", hint=f"Give its folder: {file.parent}.")
    return read_gguf(file)


def _read_folder(folder: Path) -> ModelFacts:
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{folder} holds a LoRA adapter (adapter_config.json), which is not supported.",
            hint="Merge it into its base model (peft: merge_and_unload, save_pretrained), and give that.",
        )
    config = folder / "config.json"
    if not config.is_file():
        found = sorted(file for file in folder.glob("*.gguf") if not is_later_part(file))
        if len(found) == 1:
            return read_gguf(found[0])
        if found:
            listed = ", ".join(file.name for file in found[:5])
            raise RefusedError(f"{folder} holds {len(found)} GGUF files: {listed}.", hint="Give one of them.")
        hint = "Give the folder of a whole checkpoint."
        raise RefusedError(f"{folder} holds no config.json and no GGUF file.", hint=hint)
    document = read_object(config)
    fields = config_fields(document, config)
    tensors = read_folder(folder)
    generation_file = folder / "generation_config.json"
    generation: Mapping[str, Any] = {}
    if generation_file.is_file():
        generation, eos_ids = _generation(Fields(read_object(generation_file), generation_file))
        fields["eos_ids"] = tuple(dict.fromkeys(eos_ids + fields["eos_ids"]))
    facts = ModelFacts(
        name=folder.resolve().name,
        path=folder,
        container="safetensors" if tensors else "config",
        chat_template=_chat_template(folder),
        generation=generation,
        tensors=tensors,
        stored=stored_matrices(quantization_fields(document, config), tensors),
        **fields,
    )
    return _note_unused(facts)


def _generation(fields: Fields) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Sampling defaults and eos ids of generation_config.json."""
    found: dict[str, Any] = {name: fields.maybe_number(name) for name in _SAMPLING}
    found = {name: value for name, value in found.items() if value is not None}
    if "top_k" in found:
        found["top_k"] = fields.integer("top_k", low=0)
    if fields.get("do_sample") is not None:
        found["do_sample"] = fields.flag("do_sample", False)
    return found, fields.ids("eos_token_id")


def _chat_template(folder: Path) -> str | None:
    """chat_template.jinja, else what tokenizer_config.json says; the one named default of several."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return read_bytes(own).decode("utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{own} is not UTF-8: {error}.", hint="Fetch it again.") from error
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        template = read_object(config).get("chat_template")
    except CorruptFileError as error:
        raise TokenizerError(error.reason, hint=error.hint) from error
    if template is None or isinstance(template, str):
        return template
    entries = template if isinstance(template, list) else None
    try:
        by_name = {entry["name"]: entry["template"] for entry in entries or ()}
        chosen = by_name.get("default", next(iter(by_name.values()), None))
    except (TypeError, KeyError):
        entries, chosen = None, None
    if entries is None or not (chosen is None or isinstance(chosen, str)):
        raise TokenizerError(
            f"{config}: chat_template is neither a string nor a list of named templates.",
            hint="Correct it, or put the template into chat_template.jinja.",
        )
    return chosen


def _note_unused(facts: ModelFacts) -> ModelFacts:
    """Counts what is in the files and not used."""
    mtp = [tensor for name, tensor in facts.tensors.items() if names.is_mtp(name)]
    vision = [tensor for name, tensor in facts.tensors.items() if names.is_vision(name)]
    num_mtp_layers = facts.num_mtp_layers
    if facts.tensors:
        layers = {match[1] for t in mtp if (match := re.search(r"mtp\.layers\.(\d+)\.", t.name))}
        num_mtp_layers = len(layers)
    notes = (*facts.notes, *unused_note(mtp, "of multi-token prediction are not used yet"))
    notes += unused_note(vision, "of the vision part are not loaded")
    return replace(facts, notes=notes, num_mtp_layers=num_mtp_layers)
