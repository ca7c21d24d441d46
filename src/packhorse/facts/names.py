"""Tensor names: which of a checkpoint's tensors are the text model's, and what transformers calls them."""

from __future__ import annotations

import re

_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
)
_VISION = re.compile(r"^(model\.)?(visual|vision_tower|multi_modal_projector)\.")
_MTP = re.compile(r"^(model\.)?mtp\.")


def is_vision(name: str) -> bool:
    """Whether a safetensors name belongs to the vision part."""
    return _VISION.match(name) is not None


def is_mtp(name: str) -> bool:
    """Whether a safetensors name belongs to the multi-token-prediction layers."""
    return _MTP.match(name) is not None


def text_name(name: str) -> str | None:
    """The text model's own name of a safetensors tensor (`model.layers.0...`, `lm_head.weight`).

    None for vision, multi-token prediction, and rotary frequencies that old files carry and no model reads.
    """
    if is_vision(name) or is_mtp(name) or name.endswith("rotary_emb.inv_freq"):
        return None
    for prefix, to in _PREFIXES:
        if name.startswith(prefix):
            return to + name.removeprefix(prefix)
    return name
