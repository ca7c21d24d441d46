"""Training documents: one long text, then many questions about it, in the chat form the models answer in.

Many questions a document are what makes training take minutes: each is a search through the whole text.
Only answers are trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import numpy as np
from train_recall.vocabulary import END_OF_TEXT, TURN_END, TURN_START, FastEncoder

from packhorse.verify.makers import MAKERS, Maker, Variables
from packhorse.verify.tasks import Hidden, arrange, hide

# Kinds of documents and how often they come. "prose" mixes all kinds that hide facts in text.
KINDS = {
    "prose": 50, "kv_json": 11, "frequent_words": 12, "common_words": 6, "repeated_request": 7, "clauses": 7,
    "two_documents": 7,
}  # fmt: skip
PROSE = {
    "single": 10, "multi_key": 26, "multi_value": 18, "multi_query": 12, "variables": 22, "no_shared_words": 5,
    "order": 4, "counting": 4,
}  # fmt: skip
ZH_SHARE = 0.22
SHORT_LEN = 8192
"""Tokens up to which a document is a short one."""
MAX_QUESTION_TOKENS = 6_000
IGNORED = -1
"""Label of tokens that are not trained on."""


def make_document(
    rng: Random, encode: FastEncoder, length: int, short: Mapping[str, int] = KINDS
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [length] int16 and labels [length] int16: at each place the next token, or IGNORED.

    short: what stands for KINDS where the document has at most SHORT_LEN tokens.
    """
    language = "zh" if rng.random() < ZH_SHARE else "en"
    kinds = short if length <= SHORT_LEN else KINDS
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    question_tokens = min(round(length * rng.uniform(0.15, 0.5)), MAX_QUESTION_TOKENS)
    if kind == "prose":
        main, hidden = _prose(rng, language, question_tokens)
    else:
        main = MAKERS[kind](rng, language)
        hidden = _special(rng, main, question_tokens)
    asked = len(hidden)
    if main.density or kind == "prose":
        density = rng.choice((0.0, 1.0, 4.0, 8.0))
        others = [m for m in dict.fromkeys(h.maker for h in hidden) if m.most_distractors > 1000]
        most = min(round(density * length / 1000), 400 if language == "zh" else 4000) if others else 0
        for _ in range(most):
            maker = rng.choice(others)
            hidden.append(hide(maker, maker.distractor(), rng.random()))
    ids, labels = _fill(rng, encode, main, hidden, asked, length)
    return ids, labels


def _prose(rng: Random, language: str, question_tokens: int) -> tuple[Maker, list[Hidden]]:
    """Facts of several kinds for one text; all kinds share their keys and numbers."""
    makers = {name: MAKERS[name](rng, language) for name in PROSE}
    for maker in makers.values():
        maker.share(makers["single"])
    hidden: list[Hidden] = []
    landmarks = 0
    # One kind alone in a third of the documents, as in the tasks.
    names = list(PROSE) if rng.random() < 0.67 else rng.choices(list(PROSE), list(PROSE.values()))[:1]
    weights = [PROSE[n] for n in names]
    budget = float(question_tokens)
    while budget > 0:
        name = rng.choices(names, weights)[0]
        if name == "no_shared_words":
            landmarks += 1
            if landmarks > 6:
                name = "multi_key"
        maker = makers[name]
        if isinstance(maker, Variables):
            maker.hops = rng.choice((1, 2, 2, 3, 4))
        plant = maker.target()
        hidden.append(hide(maker, plant, rng.random()))
        budget -= 24 + 13 * len(plant.lines)
    return makers["single"], hidden


def _special(rng: Random, maker: Maker, question_tokens: int) -> list[Hidden]:
    """Facts of a kind that makes its own document."""
    if maker.name in ("frequent_words", "common_words", "repeated_request"):
        count = 1
    else:
        count = max(1, question_tokens // 55)
    return [hide(maker, maker.target(), rng.random()) for _ in range(count)]


def _fill(
    rng: Random, encode: FastEncoder, main: Maker, hidden: list[Hidden], asked: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """A document of at most `length` tokens, filler made to fit; what does not fit is not asked."""
    rate = len(encode(main.separator.join(main.filler() for _ in range(32)))) / 32
    hidden_tokens = sum(len(encode(line)) + 1 for h in hidden for line in h.plant.lines)
    per_question = 46 if main.zh else 42
    room = length - hidden_tokens - 40 - per_question * asked
    filler = [main.filler() for _ in range(max(2, int(room / rate)))]
    order = list(range(asked))
    rng.shuffle(order)
    # Verification pads prompts to their length with repeats of a word.
    pad = rng.choice((" the", "", ".")) * rng.randrange(0, 24)
    while True:
        units, plants = arrange(filler, hidden)
        first = plants[order[0]]
        opening = render(main.messages(units, first.question, pad))
        ids = encode(opening)
        missing = len(ids) + len(encode(first.reply)) + 2 - length
        if missing <= 0 or not filler:
            break
        # The estimate was too low: take off what is too much.
        del filler[max(0, len(filler) - int(missing / rate) - 2) :]
    trained: list[tuple[int, int]] = []
    for number, which in enumerate(order):
        plant = plants[which]
        asked_ids = [] if number == 0 else encode(render([{"role": "user", "content": plant.question}]))
        reply_ids = encode(f"{plant.reply}{TURN_END}\n")
        if len(ids) + len(asked_ids) + len(reply_ids) > length and number > 0:
            break
        start = len(ids) + len(asked_ids)
        trained.append((start, start + len(reply_ids) - 1))
        ids += asked_ids + reply_ids
    return _labelled(ids, trained, encode.special[END_OF_TEXT], length)


def render(chat: list[dict[str, str]]) -> str:
    """A chat as the template writes it, with the opening of an answer."""
    turns = "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in chat)
    return f"{turns}{TURN_START}assistant\n"


def _labelled(
    ids: list[int], trained: list[tuple[int, int]], pad: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.full(length, pad, dtype=np.int16)
    labels = np.full(length, IGNORED, dtype=np.int16)
    kept = ids[:length]
    tokens[: len(kept)] = kept
    for start, end in trained:
        if end <= length:
            # The last token before an answer predicts its first.
            labels[start - 1 : end - 1] = tokens[start:end]
    return tokens, labels
