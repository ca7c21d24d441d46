"""Every prompt length: chunked, paged and reused equals one-shot, to the bit in exact mode.

Other engines fail at single lengths in a hundred: so every length from 1 to 260, and every length within 2 of
a multiple of the page, chunk and snapshot sizes up to 4,200, on a hybrid and on a dense model.
"""

from collections.abc import Iterable
from functools import cache

import pytest
import torch

import oracle
from engines import ask, make_engine, one_pass, tiny_model
from packhorse.models.model import Model

PAGE, CHUNK, SNAPSHOT, LONGEST = 64, 512, 1024, 4200
SHORT = range(1, 261)
FAMILIES = ["qwen3_5_moe", "qwen3"]
MODES = [(f, exact) for f in FAMILIES for exact in (True, False)]
# Plain mode promises a bound: sums are taken in another order.
PLAIN_BOUND = 2e-5


def near_multiples(size: int) -> list[int]:
    return [
        n
        for multiple in range(size, LONGEST + 1, size)
        for n in range(multiple - 2, multiple + 3)
        if n <= LONGEST
    ]


def check(got: torch.Tensor, want: torch.Tensor, exact: bool, note: str) -> None:
    if exact:
        assert torch.equal(got, want), f"{note}: bits differ"
    else:
        error = float((got - want).abs().max() / want.abs().max())
        assert error < PLAIN_BOUND, f"{note}: relative error {error:.1e}"


def engine_of(model: Model, chunk_len: int = CHUNK, longest: int = LONGEST):
    # A rare grid for exact mode's sake: snapshots of prompt ends come on top of it. Pools are filled with NaN, which
    # takes longer than a short prompt where they are for long ones.
    pages, snapshots = (90, 24) if longest == LONGEST else (longest // PAGE + 4, 6)
    return make_engine(
        model, page_len=PAGE, chunk_len=chunk_len, snapshot_len=SNAPSHOT, num_pages=pages, snapshots=snapshots
    )


@cache
def one_shot_logits(family: str, exact: bool) -> torch.Tensor:
    """Of the longest prompt, at every position."""
    return one_pass(tiny_model(family, exact), oracle.random_ids(LONGEST))


def last_logits(engine, ids: list[int]) -> tuple[torch.Tensor, int]:
    """Logits of the prompt's last token, and how many tokens were reused."""
    _, event = ask(engine, ids)
    return engine.runner.logits["r", len(ids) - 1], event.usage.cached_len


@pytest.mark.parametrize(("family", "exact"), MODES)
def test_every_short_length(family, exact):
    """One-shot, in small chunks, and reused from all that came before: each length on its own."""
    model = tiny_model(family, exact)
    ids = oracle.random_ids(SHORT.stop)
    want = one_pass(model, ids)
    reuse = engine_of(model)
    for n in SHORT:
        one_shot, cached = last_logits(engine_of(model, longest=n), ids[:n])
        assert cached == 0
        check(one_shot, want[n - 1], exact, f"one-shot {n}")
        chunked, cached = last_logits(engine_of(model, PAGE, longest=n), ids[:n])
        assert cached == 0
        check(chunked, want[n - 1], exact, f"chunked {n}")
        reused, cached = last_logits(reuse, ids[:n])
        assert cached == (n - 1) // PAGE * PAGE
        check(reused, want[n - 1], exact, f"reused {n}")


def sweep_fresh(family: str, exact: bool, lengths: Iterable[int]) -> None:
    model = tiny_model(family, exact)
    ids, want = oracle.random_ids(LONGEST), one_shot_logits(family, exact)
    for n in lengths:
        logits, cached = last_logits(engine_of(model), ids[:n])
        assert cached == 0
        check(logits, want[n - 1], exact, f"chunked {n}")


@pytest.mark.parametrize(("family", "exact"), MODES)
def test_reused_around_every_page(family, exact):
    """Lengths ascending on one engine, each going on from the pages and snapshots of those before."""
    model = tiny_model(family, exact)
    ids, want = oracle.random_ids(LONGEST), one_shot_logits(family, exact)
    engine = engine_of(model)
    reused_tokens = 0
    for n in near_multiples(PAGE):
        logits, cached = last_logits(engine, ids[:n])
        check(logits, want[n - 1], exact, f"reused {n} from {cached}")
        reused_tokens += cached
        assert cached >= n - 2 * PAGE - 2
    assert reused_tokens > 0


@pytest.mark.parametrize(("family", "exact"), MODES)
def test_fresh_around_chunks_and_snapshots(family, exact):
    sweep_fresh(family, exact, sorted({*near_multiples(SNAPSHOT), CHUNK - 1, CHUNK, CHUNK + 1, LONGEST}))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "exact"), MODES)
def test_fresh_around_every_page(family, exact):
    sweep_fresh(family, exact, near_multiples(PAGE))
