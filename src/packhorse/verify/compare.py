"""What a feature of the engine changes: the same samples with it and without it, in pairs.

the reference answers -> the feature is led over the same tokens, a decode step each: KL and top token of each
                      -> it answers by itself where a top token differs -> McNemar's test over all samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from packhorse.core.errors import UsageError
from packhorse.engine.load import DTYPES
from packhorse.verify.recall import Asker, Record, compare, trial_key
from packhorse.verify.tasks import Sample

REUSE = "reuse"
"""The feature that answers each sample again, over what was stored when it was asked first."""
COMPARED = ("kv", "dtype", "device", "exact", "chunk_len", "page_len")
"""Fields of EngineConfig that a feature may change: those whose work `Feature` can count."""


class Recorder:
    """Steering that keeps the tokens of an answer and the log-probabilities [V] that each was chosen from.

    lead: the tokens that the answer gets, whatever is likeliest; None leaves it alone.
    """

    def __init__(self, lead: Sequence[int] | None = None) -> None:
        self.token_ids: list[int] = []
        self.rows: list[Tensor] = []
        self._lead = lead

    def steer(self, scores: Tensor) -> Tensor:
        """See Steering."""
        self.rows.append(scores.double().log_softmax(-1).cpu())
        if self._lead is None:
            return scores
        led = torch.full_like(scores, float("-inf"))
        led[self._lead[len(self.token_ids)]] = 0
        return led

    def advance(self, token_id: int) -> None:
        """See Steering."""
        self.token_ids.append(token_id)


def parse_changes(text: str, longest: int) -> dict[str, Any]:
    """The settings of a feature from FIELD=VALUE,...; none for REUSE. Raises UsageError for what is neither, for a
    field with two values or with `auto`, which may be what the run has, and for chunks that end behind prompts of
    `longest` tokens: they never are at work."""
    changes: dict[str, Any] = {}
    for part in () if text == REUSE else text.split(","):
        name, _, value = part.strip().partition("=")
        number = name in ("chunk_len", "page_len")
        if name not in COMPARED or not value or (number and not value.isdecimal()):
            hint = f"Give {REUSE}, or FIELD=VALUE with one of {', '.join(COMPARED)}."
            raise UsageError(f"{part!r} is nothing that can be compared.", hint=hint)
        if value == "auto" or (name == "exact" and value not in ("true", "false")):
            hint = (
                "Give exact=true or exact=false." if name == "exact" else f"Name the {name} to compare with."
            )
            raise UsageError(f"{part!r} does not say what {name} is to be.", hint=hint)
        if name in changes:
            hint = "Give --compare twice to compare two ways."
            raise UsageError(f"--compare {text} gives {name} two values.", hint=hint)
        changes[name] = value == "true" if name == "exact" else int(value) if number else value
    if changes.get("chunk_len", 0) >= longest:
        reason = (
            f"--compare {text} would never be at work: a chunk holds a whole prompt of {longest:,} tokens."
        )
        raise UsageError(reason, hint="Give --lengths more tokens, or a smaller chunk_len.")
    return changes


def settings_in_use(asker: Asker) -> dict[str, Any]:
    """What an asker's engine has for each of COMPARED, whatever `auto` or nothing came to."""
    engine = asker.session.engine
    model, store = engine.runner.model, engine.store
    return {
        "kv": store.geometry.codec.name, "dtype": next(name for name, found in DTYPES.items() if found is model.dtype),
        "device": str(model.device), "exact": model.exact, "chunk_len": engine.scheduler.chunk_len,
        "page_len": store.page_len,
    }  # fmt: skip


def check_differs(name: str, changes: Mapping[str, Any], reference: Asker) -> None:
    """Raises UsageError where one of a feature's changes is what the reference's engine has without it."""
    found = settings_in_use(reference)
    for setting, value in changes.items():
        if found[setting] == value:
            same = f"without it {setting} is {str(value).lower()} too."
            hint = f"Compare with another {setting}, or give the run another one by its own option."
            raise UsageError(f"--compare {name} would change nothing: {same}", hint=hint)


@dataclass
class Feature:
    """One way to run the model. changes: as `parse_changes` gives them; the asker's engine has them.

    records: of its answers, with `kl` (nats a token, of the reference's distribution against this one), `same`
    (whether a token's likeliest is the reference's) and `active` (how often the feature was at work).
    """

    name: str
    changes: Mapping[str, Any]
    asker: Asker
    records: list[Record] = field(default_factory=list)

    def follow(self, sample: Sample, want: Recorder) -> None:
        """Answer a sample that the reference answered with `want`."""
        if self.name == REUSE:
            self.asker.ask(sample)
        got = Recorder(want.token_ids)
        record = self.asker.ask(sample, got)
        active = self._active(record)
        p, q = torch.stack(want.rows), torch.stack(got.rows)
        same = (q.argmax(-1) == torch.tensor(want.token_ids)).tolist()
        if not all(same):  # else greedy decoding goes the same way
            record = self.asker.ask(sample)
        kl = (p.exp() * (p - q)).sum(-1).tolist()
        self.records.append({**record, "kl": kl, "same": same, "active": active})

    def _active(self, record: Record) -> int:
        """Tokens reused; steps that ended inside the prompt; else tokens or pages that the engine, as it is,
        computed or holds with every one of the settings."""
        if self.name == REUSE:
            return int(record["reused_tokens"])
        tokens = record["read_tokens"] - record["reused_tokens"] + record["generated_tokens"]
        pages, steps = self.asker.session.engine.store.stats.pages_cached, record["read_steps"] - 1
        counts = {"kv": pages, "dtype": tokens, "device": tokens, "exact": tokens, "page_len": pages}
        found = settings_in_use(self.asker)
        return min(counts.get(name, steps) * (found[name] == value) for name, value in self.changes.items())

    def row(self, reference: Sequence[Record]) -> dict[str, Any]:
        """See `feature_row`."""
        return feature_row(self.name, self.records, reference)


def feature_row(name: str, records: Sequence[Record], reference: Sequence[Record]) -> dict[str, Any]:
    """A feature's figures from its records against the reference's. Raises UsageError where it never was at work."""
    asked = {trial_key(record) for record in reference}
    # A run that was cut may have left one more, and asked it again.
    known = {trial_key(record): record for record in records}
    ours = [record for key, record in known.items() if key in asked]
    active = sum(record["active"] for record in ours)
    if not active:
        where = f"in any of {len(ours)} sample{'s' * (len(ours) != 1)}, so nothing was compared."
        hint = "Ask for longer prompts, or leave it out of --compare."
        raise UsageError(f"{name} was not at work {where}", hint=hint)
    kl = [value for record in ours for value in record["kl"]]
    same = [value for record in ours for value in record["same"]]
    found = compare(reference, ours)
    return {
        "feature": name, "active": active, "pairs": found.pairs, "p": found.p, "tokens": len(kl),
        "reference_right": found.both + found.only_first, "right": found.both + found.only_second,
        "only_reference": found.only_first, "only_feature": found.only_second,
        "kl_mean": sum(kl) / len(kl), "kl_max": max(kl), "same_token": sum(same) / len(same),
    }  # fmt: skip


def ask_pairs(reference: Asker, features: Sequence[Feature], sample: Sample) -> Record:
    """The reference's record of a sample, after every feature has followed it."""
    want = Recorder()
    record = reference.ask(sample, want)
    for feature in features:
        feature.follow(sample, want)
    return record
