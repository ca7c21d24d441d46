"""Writes a recall model as a checkpoint folder: python -m train_recall.export hybrid WEIGHTS FOLDER."""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors.torch import load_file, save_file
from train_recall.net import CONFIGS, RecallNet
from train_recall.vocabulary import END_OF_TEXT, TURN_END, load_tokenizer, save_tokenizer, write_json


def export(kind: str, weights: Path, folder: Path) -> None:
    """config.json, model.safetensors, tokenizer, chat template and generation settings."""
    save_tokenizer(folder)
    tensors = load_file(weights)
    RecallNet(kind).load_state_dict(tensors)  # names and shapes are right, or it raises
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer()
    ids = {
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    write_json(folder / "config.json", {**CONFIGS[kind], "bos_token_id": None, **ids})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=list(CONFIGS))
    parser.add_argument("weights", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    export(args.kind, args.weights, args.folder)


if __name__ == "__main__":
    main()
