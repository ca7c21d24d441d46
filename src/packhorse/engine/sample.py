"""The next token of each row, drawn from raw logits. Correct on any device; rows never meet.

Order: repetition, presence and frequency penalties -> logit_bias -> steering -> temperature -> top_k -> top_p
-> min_p -> draw, which is the order of transformers' generate. Temperature 0 is the argmax of what steering
leaves, the lowest id of equals.

- Repetition divides positive scores by the penalty and multiplies negative ones, once for each token seen in
  prompt or answer. Presence is subtracted once, frequency once for each occurrence, in the answer alone.
- top_k keeps exactly k tokens, the lower id of equals. top_p keeps the fewest of the most likely tokens whose
  share of what top_k left reaches top_p. min_p drops tokens below min_p times the likelihood of the best,
  after temperature. The best token is always kept.
- The draw is an inverse CDF in float64 over the kept tokens in the order of their ids, at one 53-bit uniform
  number that BLAKE2b makes of the seed and the index of the token in the answer. So a token depends on its
  own logits, parameters, seed and index, and on nothing else in the batch; and small differences between
  the logits of two devices seldom change it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from packhorse.core.errors import ComputeError, PackhorseError
from packhorse.core.types import Request, SamplingParams, TokenLogprob

_NUCLEUS_LEN = 256
"""Tokens sorted at first for top_p; most nuclei are smaller than that."""


class Sampled(NamedTuple):
    """A drawn token, and its log-probability where the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


class Sampler:
    """How one request draws its tokens. `sample` uses it and moves it on.

    seed: the request's, or one drawn here. num_drawn: tokens drawn so far, the index of the next one.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.params = request.sampling
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        self.num_drawn = 0
        self._seen: _Seen | None = None

    @property
    def position(self) -> int:
        """The position of the next token in the sequence."""
        return len(self.request.token_ids) + self.num_drawn

    @property
    def _has_penalties(self) -> bool:
        p = self.params
        return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0

    def draw(self, logits: Tensor, best: int) -> Sampled:
        """The next token from finite raw logits [V], whose argmax is `best`.

        Raises what the request's steering raises: then nothing was drawn.
        """
        scores = self._scores(logits)
        if self.params.temperature > 0:
            ids, weights = distribution(scores, self.params)
            token_id = _pick(ids, weights, uniform(self.seed, self.num_drawn))
        else:
            token_id = best if scores is logits else int(scores.argmax())
        self.num_drawn += 1
        if self._seen is not None:
            self._seen.add(token_id)
        if self.request.steering is not None:
            self.request.steering.advance(token_id)
        wanted = self.params.logprobs
        return Sampled(token_id, None if wanted is None else token_logprob(logits, token_id, wanted))

    def _scores(self, logits: Tensor) -> Tensor:
        """Scores [V]: `logits` itself where nothing changes them. Penalties and biases are float64, so that
        nothing overflows; steering only lowers scores to -inf."""
        scores = logits
        if self._has_penalties:
            if self._seen is None:
                self._seen = _Seen(self.request, logits)
            scores = self._seen.penalise(scores.double())
        if self.params.logit_bias:
            scores = scores.double() if scores is logits else scores
            for token_id, bias in self.params.logit_bias:
                scores[token_id] += bias
        steering = self.request.steering
        return scores if steering is None else steering.steer(scores)


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[Sampled | PackhorseError]:
    """Draw one token for each row, and move the samplers on.

    logits: [R, V], raw, fp32, not changed; samplers: R, in the order of the rows. A row with a NaN or an
    infinity gives a ComputeError in place of a token, and so does an error of a request's steering; its
    sampler stays, and the other rows go on.
    """
    assert logits.dtype == torch.float32 and logits.shape[0] == len(samplers)
    if not samplers:
        return []
    # The least and the greatest value are NaN where any is. All in one tensor, because each that is read waits for the
    # card; fp32 holds ids up to 2^24.
    ends = torch.stack((logits.amin(dim=1), logits.amax(dim=1), logits.argmax(dim=1).float()), dim=1)
    return [
        _draw(sampler, row, int(best)) if isfinite(low) and isfinite(high) else _not_finite(sampler)
        for row, sampler, (low, high, best) in zip(logits, samplers, ends.tolist(), strict=True)
    ]


def _draw(sampler: Sampler, logits: Tensor, best: int) -> Sampled | PackhorseError:
    try:
        return sampler.draw(logits, best)
    except PackhorseError as error:
        return error
    except Exception as error:  # a foreign grammar's: its request ends, and no other
        return ComputeError(f"Drawing a token for {sampler.request.id!r} broke: {error!r}.")


def uniform(seed: int, index: int) -> float:
    """The 53-bit uniform number in [0, 1) that belongs to token `index` of an answer with this seed."""
    digest = blake2b(f"{seed},{index}".encode(), digest_size=8, person=b"packhorse-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def token_logprob(logits: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probability of a token under logits [V], in float64, and the `num_top` most likely tokens.

    The alternatives go from the most likely down, the lower id of equals first; the token itself is among
    them where it is that likely.
    """
    total = logits.double().logsumexp(0)
    ids: list[int] = _largest(logits, num_top).tolist() if num_top else []
    top = tuple((i, float(logits[i].double() - total)) for i in ids)
    return TokenLogprob(token_id, float(logits[token_id].double() - total), top)


class _Seen:
    """The distinct tokens of an answer (of the prompt too under a repetition penalty), counted as they come.

    ids, counts: room for every token the request can still bring; the first `num_ids` are in use. counts are
    occurrences in the answer.
    """

    def __init__(self, request: Request, logits: Tensor) -> None:
        p = self.params = request.sampling
        prompt_ids = list(dict.fromkeys(request.token_ids)) if p.repetition_penalty != 1 else []
        self.index = {token_id: i for i, token_id in enumerate(prompt_ids)}
        capacity = min(len(prompt_ids) + p.max_tokens, logits.shape[0])
        self.ids = torch.zeros(capacity, dtype=torch.int64, device=logits.device)
        self.ids[: len(prompt_ids)] = torch.tensor(prompt_ids, dtype=torch.int64)
        self.counts = torch.zeros(capacity, dtype=torch.float64, device=logits.device)

    def add(self, token_id: int) -> None:
        index = self.index.setdefault(token_id, len(self.index))
        self.ids[index] = token_id
        self.counts[index] += 1

    def penalise(self, scores: Tensor) -> Tensor:
        """Apply the penalties to scores [V], in place."""
        ids, counts = self.ids[: len(self.index)], self.counts[: len(self.index)]
        p, seen = self.params, scores[ids]
        seen = torch.where(seen < 0, seen * p.repetition_penalty, seen / p.repetition_penalty)
        scores[ids] = seen - p.presence_penalty * (counts > 0) - p.frequency_penalty * counts
        return scores


def distribution(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn, and how likely they are.

    scores: [V], after penalties and steering; finite or -inf, at least one finite. Temperature must not be 0.
    Returns ids in ascending order and float64 weights, both [K]; the greatest weight is 1, a probability is a
    weight over their sum.
    """
    if 0 < params.top_k < scores.shape[0]:
        ids = _largest(scores, params.top_k).sort().values
        scores = scores[ids]
    else:
        ids = torch.arange(scores.shape[0], device=scores.device)
    scores = scores.double()
    weights = ((scores - scores.max()) / params.temperature).exp()
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0:
        kept = weights >= params.min_p
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _pick(ids: Tensor, weights: Tensor, u: float) -> int:
    """The id at which the cumulated weights first exceed u x their sum, u in [0, 1)."""
    # On the CPU, because a scan on a GPU may add up in another order each time.
    cdf = weights.cpu().cumsum(0)
    # An entry above is always there: at most (1 - 2^-53) x sum is a float64 below the sum.
    return int(ids[torch.searchsorted(cdf, u * cdf[-1], right=True)])


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Ascending indices of the fewest largest weights that reach top_p of their sum."""
    target = float(top_p * weights.sum())
    length = _NUCLEUS_LEN
    while True:
        indices = _largest(weights, length)
        reached = weights[indices].cpu().cumsum(0)
        if reached[-1] >= target or length >= weights.shape[0]:
            count = int((reached < target).sum()) + 1
            return indices[:count].sort().values
        length *= 8


def _largest(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest of values [N] (all, where N is less), largest first, equals by index."""
    if k >= values.shape[0]:
        return values.sort(descending=True, stable=True).indices
    # topk alone leaves open which of several equal values it returns.
    indices = (values >= values.topk(k, sorted=False).values.min()).nonzero().squeeze(1)
    return indices[values[indices].sort(descending=True, stable=True).indices[:k]]


def _not_finite(sampler: Sampler) -> ComputeError:
    return ComputeError(
        f"The model produced non-finite logits for request {sampler.request.id!r} at position "
        f"{sampler.position:,}.",
        hint="Check the weights with `packhorse inspect`, or compute in a wider type (--dtype fp32).",
        request_id=sampler.request.id,
        position=sampler.position,
    )
