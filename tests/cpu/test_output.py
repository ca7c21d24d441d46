"""Output assembly: stop strings against a character-by-character twin, ends, log-probabilities."""

import codecs

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from packhorse.core.types import FinishReason, SamplingParams, TokenLogprob
from packhorse.engine.output import Output, Piece
from packhorse.text.tokenizer import LETTER_BYTES, Tokenizer
from packhorse.text.tokenizer import Detokenizer as TextDetokenizer

EOS = (900, 901)


class ByteDetokenizer:
    """Token n stands for the bytes table[n]; half characters are held back."""

    def __init__(self, table: list[bytes]) -> None:
        self.table = table
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        return self.utf8.decode(self.table[token_id])

    def finish(self) -> str:
        return self.utf8.decode(b"", final=True)


def answer(table: list[bytes], ids: list[int] | None = None, **params: object) -> list[Piece]:
    """Pieces of the tokens of `table` in order (or of `ids`), up to the finish."""
    output = Output(SamplingParams(**{"max_tokens": 1000, **params}), EOS, ByteDetokenizer(table))
    pieces: list[Piece] = []
    for token_id in ids or [*range(len(table)), EOS[0]]:
        pieces.append(output.feed(token_id))
        if pieces[-1].finish:
            break
    assert output.num_tokens == len(pieces)
    return pieces


def texts(pieces: list[Piece]) -> list[str]:
    return [p.text for p in pieces]


def split(text: str, *lengths: int) -> list[bytes]:
    """The bytes of a text cut into tokens of the given lengths, the rest into one."""
    data, tokens = text.encode(), []
    for length in lengths:
        tokens.append(data[:length])
        data = data[length:]
    return [*tokens, data] if data else tokens


def until_stop(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The twin: reads a text character by character and stops where a stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def test_plain_text_comes_at_once():
    pieces = answer([b"Hel", b"lo ", b"world"])
    assert texts(pieces) == ["Hel", "lo ", "world", ""]
    assert [p.token_ids for p in pieces] == [(0,), (1,), (2,), (900,)]
    assert [p.finish for p in pieces] == [None, None, None, FinishReason.STOP]


@pytest.mark.parametrize("eos", EOS)
def test_both_eos_ids_end_and_are_no_text(eos: int):
    pieces = answer([b"a", b"b"], [0, eos, 1])
    assert texts(pieces) == ["a", ""] and pieces[-1].finish is FinishReason.STOP
    assert pieces[-1].token_ids == (eos,)


def test_eos_as_the_first_token_gives_an_empty_answer():
    assert answer([], [EOS[1]]) == [Piece(token_ids=(901,), finish=FinishReason.STOP)]


def test_ignore_eos_goes_on_through_eos_but_not_through_stop_ids():
    table = [b"a", b"b", *[b""] * 898, b"<eos>", b"<eot>"]
    pieces = answer(table, [0, 900, 901, 1, 1], ignore_eos=True, max_tokens=4)
    assert "".join(texts(pieces)) == "a<eos><eot>b" and pieces[-1].finish is FinishReason.LENGTH
    pieces = answer(table, [0, 900, 901], ignore_eos=True, stop_ids=(901,))
    assert "".join(texts(pieces)) == "a<eos>" and pieces[-1].finish is FinishReason.STOP


def test_stop_ids_end_beside_eos():
    pieces = answer([b"a", b"b"], [0, 1, 0], stop_ids=(1,))
    assert texts(pieces) == ["a", ""] and pieces[-1].finish is FinishReason.STOP
    assert answer([b"a"], [0, EOS[0]], stop_ids=(7,))[-1].finish is FinishReason.STOP


def test_max_tokens_ends_with_length():
    pieces = answer([b"a", b"b", b"c"], max_tokens=2)
    assert texts(pieces) == ["a", "b"] and pieces[-1].finish is FinishReason.LENGTH


def test_eos_or_a_stop_string_in_the_last_allowed_token_is_a_stop():
    assert answer([b"a"], max_tokens=2)[-1].finish is FinishReason.STOP
    pieces = answer([b"a", b"END"], max_tokens=2, stop=("END",))
    assert texts(pieces) == ["a", ""] and pieces[-1].finish is FinishReason.STOP


def test_a_stop_string_inside_one_token():
    pieces = answer([b"one END two", b"never"], stop=("END",))
    assert texts(pieces) == ["one "] and pieces[0].finish is FinishReason.STOP


def test_a_stop_string_at_the_very_first_token():
    assert answer([b"END"], stop=("END",)) == [Piece((0,), finish=FinishReason.STOP)]


def test_text_is_held_back_only_while_it_may_be_a_stop_string():
    pieces = answer(split("a STOPS not. STO, STOP!", 3, 2, 1, 6, 5, 2, 3), stop=("STOP!",))
    assert texts(pieces) == ["a ", "", "", "STOPS not.", " STO,", " ", "", ""]
    assert pieces[-1].finish is FinishReason.STOP


def test_a_stop_string_over_ten_tokens():
    pieces = answer(split("ok <|finish|", *[1] * 12), stop=("<|finish|",))
    assert texts(pieces) == ["o", "k", " ", *[""] * 9] and pieces[-1].finish is FinishReason.STOP
    assert sum(len(p.token_ids) for p in pieces) == 12


@pytest.mark.parametrize("ending", [{"max_tokens": 2}, {}])
def test_what_was_held_back_is_released_at_the_end(ending: dict):
    pieces = answer([b"x", b"EN"], stop=("END",), **ending)
    assert "".join(texts(pieces)) == "xEN" and texts(pieces)[0] == "x"


def test_a_false_start_inside_a_stop_string():
    pieces = answer(split("aab aaab", *[1] * 8), stop=("aaab",))
    assert "".join(texts(pieces)) == "aab " and pieces[-1].finish is FinishReason.STOP


@pytest.mark.parametrize(
    "text, stop, kept",
    [
        ("hello world", ("world", "lo wo"), "hel"),  # the earlier one, though listed last
        ("hello world", ("lo", "hello world"), "hel"),  # complete first
        ("abcd", ("bcd", "abcd", "cd"), ""),  # complete at once: the longest
        ("xabc", ("abcd", "bc"), "xa"),  # the longer one never completes
        ("xabcd", ("abcd", "bc"), "xa"),  # and would complete later
        ("aXbY", ("Y", "X"), "a"),
    ],
)
def test_overlapping_stop_strings(text: str, stop: tuple[str, ...], kept: str):
    assert until_stop(text, stop) == (kept, True)
    for table in (split(text), split(text, *[1] * len(text)), split(text, 2, 1, 1)):
        assert "".join(texts(answer(table, stop=stop))) == kept


def test_half_characters():
    euro = "€".encode()
    pieces = answer([b"5 " + euro[:1], euro[1:2], euro[2:] + b"!"])
    assert texts(pieces) == ["5 ", "", "€!", ""]
    assert texts(answer([b"5 " + euro[:2]], max_tokens=1)) == ["5 \ufffd"]
    assert texts(answer([b"5 " + euro[:2]])) == ["5 ", "\ufffd"]


def test_stop_strings_beside_and_of_half_characters():
    euro = "€".encode()
    assert texts(answer([b"aEND" + euro[:2], euro[2:]], stop=("END",))) == ["a"]
    assert texts(answer([b"aEN" + euro[:2], euro[2:]], stop=("EN€",))) == ["a", ""]
    assert texts(answer([b"a" + euro[:1], euro[1:], b"b"], stop=("€b",))) == ["a", "", ""]
    # The half character becomes U+FFFD when the answer ends, and that may be what was waited for.
    pieces = answer([b"a", b"EN" + euro[:2]], stop=("EN\ufffd",), max_tokens=2)
    assert texts(pieces) == ["a", ""] and pieces[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_an_end_from_outside_releases_what_is_held(reason: FinishReason):
    output = Output(SamplingParams(stop=("END",)), EOS, ByteDetokenizer([b"x E", b"N"]))
    assert [output.feed(0).text, output.feed(1).text] == ["x ", ""]
    assert output.end(reason) == Piece(text="EN", finish=reason)


def test_logprobs_stay_with_their_tokens():
    logprobs = [TokenLogprob(n, -0.5 * n) for n in range(3)]
    output = Output(SamplingParams(stop=("bc",), logprobs=0), EOS, ByteDetokenizer([b"a", b"b", b"c"]))
    pieces = [output.feed(n, logprobs[n]) for n in range(3)]
    assert [p.logprobs for p in pieces] == [(lp,) for lp in logprobs]
    assert [p.token_ids for p in pieces] == [(0,), (1,), (2,)] and pieces[-1].finish is FinishReason.STOP


STOPS = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3).map(tuple)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab€", max_size=24),
    stop=STOPS,
    lengths=st.lists(st.integers(1, 5), max_size=30),
    limit=st.none() | st.integers(1, 12),
)
def test_any_cut_gives_the_text_of_the_twin(
    text: str, stop: tuple[str, ...], lengths: list[int], limit: int | None
):
    table = split(text, *lengths)
    pieces = answer(table, stop=stop, max_tokens=limit or 1000)
    visible = b"".join(table[: len(pieces)] if limit is None else table[:limit]).decode(errors="replace")
    kept, stopped = until_stop(visible, stop)
    assert "".join(texts(pieces)) == kept
    ends = limit is not None and limit <= len(table)
    assert (pieces[-1].finish is FinishReason.LENGTH) == (ends and not stopped)
    said = ""
    for piece in pieces[:-1]:  # nothing is held that cannot become a stop string or a character
        said += piece.text
        read = b"".join(table[: piece.token_ids[0] + 1])
        held = codecs.getincrementaldecoder("utf-8")().decode(read)[len(said) :]
        assert not held or any(s.startswith(held) for s in stop)


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """A byte-level vocabulary without merges: id n is byte n."""
    letters = {byte: letter for letter, byte in LETTER_BYTES.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab={letters[n]: n for n in range(256)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=20), stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple))
def test_with_the_tokenizers_own_detokenizer(byte_tokenizer: Tokenizer, text: str, stop: tuple[str, ...]):
    output = Output(SamplingParams(stop=stop), EOS, TextDetokenizer(byte_tokenizer))
    said = ""
    for token_id in [*text.encode(), EOS[0]]:
        piece = output.feed(token_id)
        said += piece.text
        if piece.finish:
            break
    assert said == until_stop(text, stop)[0]
