"""The recall models' tokenizer: 1,152 tokens, words of the generated language over bytes.

A word that is in the vocabulary is one token, with the space before it; so are each digit and each listed
Chinese character. Everything else is spelled in bytes, so that any text can be written.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from packhorse.verify.makers import MAKERS
from packhorse.verify.tasks import arrange, hide

SIZE = 1152
FILE = Path(__file__).with_name("tokenizer.json")
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
HAN = r"\x{4e00}-\x{9fff}"
SPLIT = rf" ?[A-Za-z]+|[0-9]|[{HAN}]| ?[^\sA-Za-z0-9{HAN}]|\s"
FAST_SPLIT = re.compile(
    "<\\|[a-z_]+\\|>|" + SPLIT.replace(r"\x{4e00}", "\u4e00").replace(r"\x{9fff}", "\u9fff")
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def spell(text: str) -> str:
    """A piece of text as the vocabulary writes it."""
    letters = byte_letters()
    return "".join(letters[b] for b in text.encode())


def frequent_pieces(seed: int = 0) -> list[str]:
    """Pieces of generated documents in all languages and kinds, the most frequent first."""
    counts: Counter[str] = Counter()
    rng = Random(seed)
    for language in ("en", "zh"):
        for make in MAKERS.values():
            for _ in range(150):
                maker = make(rng, language)
                hidden = [
                    hide(maker, maker.target(), rng.random()) for _ in range(1 if not maker.density else 4)
                ]
                units, plants = arrange([maker.filler() for _ in range(60)], hidden)
                for plant in plants:
                    for message in maker.messages(units, plant.question, ""):
                        counts.update(FAST_SPLIT.findall(message["content"]))
                    counts.update(FAST_SPLIT.findall(plant.reply))
    # A small word without a space before it begins a list or is a piece of a hexadecimal code.
    return [
        p for p, n in counts.most_common() if n > 1 and len(p.encode()) > 1 and not re.fullmatch("[a-z]+", p)
    ]


def load_tokenizer() -> Tokenizer:
    """The tokenizer of both recall models, as it was made once: weights belong to its ids."""
    return Tokenizer.from_file(str(FILE))


def make_tokenizer() -> Tokenizer:
    """A new tokenizer from the words that generated documents hold now; for models trained from the start."""
    pieces = [*byte_letters(), "user", "assistant", "system"]
    for piece in frequent_pieces():
        written = spell(piece)
        if written not in pieces and len(pieces) < SIZE - len(SPECIAL):
            pieces.append(written)
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], ignore_merges=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {t: tokenizer.token_to_id(t) for t in SPECIAL}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "model_max_length": 262144,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(
        folder / "generation_config.json",
        {
            "do_sample": False,
            "eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]],
            "pad_token_id": ids[END_OF_TEXT],
        },
    )


def write_json(path: Path, value: object) -> None:
    """A JSON file as people write them."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class FastEncoder:
    """Ids of text, equal to the tokenizer's and quick enough to feed training: one dictionary look-up a piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocab = tokenizer.get_vocab()
        self.special = {t: vocab[t] for t in SPECIAL}

        @lru_cache(maxsize=200_000)
        def piece_ids(piece: str) -> tuple[int, ...]:
            if piece in self.special:
                return (self.special[piece],)
            written = spell(piece)
            return (vocab[written],) if written in vocab else tuple(vocab[letter] for letter in written)

        self.piece_ids = piece_ids

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in FAST_SPLIT.findall(text):
            ids += self.piece_ids(piece)
        return ids


if __name__ == "__main__":
    make_tokenizer().save(str(FILE))
