"""Drawing on the device of the logits: the tokens of engine.sample."""

import pytest

import sample_cases as cases


@pytest.mark.parametrize(("vocab", "rounds"), [(1, 2), (7, 20), (300, 40), (5000, 10)])
def test_draws(vocab, rounds):
    cases.check_draws(vocab, "cpu", rounds)


def test_broken_rows():
    cases.check_broken_rows("cpu")
