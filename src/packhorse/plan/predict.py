"""How long it will take: bytes over each link and operations over each unit, at calibrated efficiencies.

Each figure comes three times, (low, expected, high) of the calibration's values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from packhorse.core import cost
from packhorse.core.units import ceil_div
from packhorse.facts.machine import Machine, calibration
from packhorse.facts.model import ModelFacts
from packhorse.facts.packed import packed_matrices
from packhorse.plan import account
from packhorse.plan.place import Footprint, Placement

LOW, EXPECTED, HIGH = 0, 1, 2
QUESTION_LEN = 64
"""Tokens of the follow-up question that is predicted."""
_MICROSECONDS = ("kernel_us", "step_us", "sequence_us", "chunk_us")
LONG_PROMPT = 1024
"""Tokens from which on Hopper has a kernel of its own for a prompt's attention, as kernels.attention.flash has it."""


@dataclass(frozen=True)
class Times:
    """Seconds and tokens a second of one placement. warm_*: the context's KV and state are in that tier; None
    where it has no room for them. tail_64: a follow-up of 64 tokens, all before it on the card. decode_*: of one
    sequence, at the start and at the end of the context; total: of all sequences at the end. queue_wait: until
    one's own prompt is begun, where all sequences come at once with the longest prompts."""

    cold_first_token_s: float
    warm_ram_first_token_s: float | None
    warm_disk_first_token_s: float | None
    tail_64_s: float
    decode_tok_s_start: float
    decode_tok_s_end: float
    decode_tok_s_total: float
    queue_wait_s: float
    load_s: float

    def rounded(self) -> dict[str, float | None]:
        """Every figure by name, to four digits."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: None if value is None else float(f"{value:.4g}") for name, value in values.items()}


@dataclass(frozen=True)
class Speed:
    """Rates of one card (or a CPU) as the engine is taken to reach them, in bytes or operations a second.

    dense, experts, kv: reading weights that stay, routed experts on the card, and K and V. link, copies: what is in
    host memory, where kernels read it and where it is copied ahead. load: making weights of files. products,
    expert_products, attention, delta: operations of prompts; short_attention: of fewer than LONG_PROMPT tokens.
    expert_values: values of packed experts that are decoded for a prompt's chunk. row_passes: times that a layer reads
    or writes the widest rows of a prompt's tokens. kernel_s: a kernel of a captured step beside its bytes; step_s: a
    step beside its kernels, sequence_s: for each of its sequences. chunk_s: to send a card the
    work of a prompt's chunk in a layer, which short chunks wait for."""

    dense: float
    experts: float
    kv: float
    link: float
    copies: float
    drive: float
    load: float
    products: float
    expert_products: float
    attention: float
    short_attention: float
    delta: float
    expert_values: float
    row_passes: float
    kernel_s: float
    step_s: float
    sequence_s: float
    chunk_s: float

    def kv_rate(self, codec: str) -> float:
        """At which attention reads K and V in a codec: `kv` is fp8's."""
        return self.kv * float(calibration()["kv_codecs"]["values"][codec])

    @classmethod
    def of(cls, machine: Machine, band: int) -> Speed:
        """The rates in one band of the calibration."""
        data = calibration()
        part = {name: entry["values"][band] for name, entry in data["fractions"].items()}
        cost_of = {name: data[name]["values"][-1 - band] for name in (*_MICROSECONDS, "row_passes")}
        fixed = {f"{name[:-3]}_s": 1e-6 * cost_of[name] for name in _MICROSECONDS}
        fixed["drive"] = machine.drive_rate * part["drive"]
        memory = machine.memory_rate * part["memory"]
        if machine.card is None:
            fixed["kernel_s"] = 1e-6 * data["cpu_kernel_us"]["values"][-1 - band]
            flops = 1e9 * data["cpu_gflops_per_core"]["values"][band] * machine.cores
            reads = dict.fromkeys(("dense", "experts", "kv", "link", "copies"), memory)
            kinds = ("products", "expert_products", "attention", "short_attention", "delta")
            # What is decoded there is counted in the products.
            products = dict.fromkeys(kinds, flops) | {"expert_values": math.inf}
            return cls(**reads, **products, **fixed, load=machine.drive_rate, row_passes=0.0)
        card = machine.card
        return cls(
            **fixed,
            dense=card.read_rate * part["vram"],
            experts=card.read_rate * part["vram_experts"],
            kv=card.read_rate * part["vram_kv"],
            link=min(machine.link_rate * part["link"], machine.memory_rate),
            copies=min(machine.link_rate * part["copies"], machine.memory_rate),
            load=1e6 * data["load_mb_s_per_core"]["values"][band] * machine.cores,
            products=card.flops * part["tensor"],
            expert_products=card.flops * part["tensor_experts"],
            attention=card.flops * part["attention_hopper" if card.arch == 90 else "attention"],
            short_attention=card.flops * part["attention"],
            delta=card.flops * part["delta"],
            expert_values=card.flops * part["expert_values"],
            row_passes=cost_of["row_passes"],
        )


def predict(footprint: Footprint, machine: Machine, placement: Placement, band: int = EXPECTED) -> Times:
    """Times of a placement that fits."""
    speed, job = Speed.of(machine, band), placement.job
    step = _Step(footprint, placement, speed, band)
    cold = step.prefill_s(job.context) + step.decode_s(job.context, 1)
    tail = step.tail_s(job.context)
    kept = account.kv_token_bytes(footprint.facts, job.kv) * job.device_kv + footprint.snapshot_bytes
    from_ram = kept / speed.copies + tail
    start, end = step.decode_s(0, 1), step.decode_s(job.context, 1)
    together = step.decode_s(job.context, job.sequences)
    return Times(
        cold_first_token_s=cold,
        warm_ram_first_token_s=from_ram if placement.host_document else None,
        warm_disk_first_token_s=max(kept / speed.drive + tail, from_ram) if placement.disk_document else None,
        tail_64_s=tail,
        decode_tok_s_start=step.tokens / start,
        decode_tok_s_end=step.tokens / end,
        decode_tok_s_total=step.tokens * job.sequences / together,
        queue_wait_s=(job.sequences - 1) * cold,
        load_s=_load_s(footprint, machine, speed, band),
    )


def _load_s(footprint: Footprint, machine: Machine, speed: Speed, band: int) -> float:
    """Reading the files, or making weights of them, whatever takes longer."""
    weights, rate = sum(footprint.classes.values()), speed.load
    if machine.card is None and (footprint.recipe.is_packed or packed_matrices(footprint.facts)):
        kind = "packed" if footprint.recipe.is_packed else "unpacked"
        rate = 1e6 * calibration()["cpu_load_mb_s_per_core"][kind][band] * machine.cores
    return max(footprint.file_bytes / speed.drive, weights / rate)


def tail_s(footprint: Footprint, machine: Machine, placement: Placement, num_tokens: int) -> float:
    """Seconds until the first token of a follow-up of `num_tokens` tokens, all before it on the card, as expected."""
    return _Step(footprint, placement, Speed.of(machine, EXPECTED), EXPECTED).tail_s(
        placement.job.context, num_tokens
    )


class _Step:
    """Times of the parts of one placement's work."""

    def __init__(self, footprint: Footprint, placement: Placement, speed: Speed, band: int) -> None:
        self.facts, self.speed = footprint.facts, speed
        self._footprint, self._placement = footprint, placement
        accepted = calibration()["draft_acceptance"]["values"][band]
        # A guess counts where all before it were right.
        self.tokens = sum(accepted**index for index in range(placement.job.draft + 1))
        self._kernels_s = step_kernels(self.facts) * speed.kernel_s + speed.step_s
        self._dense = dense_bytes(footprint)
        if placement.job.draft:
            shared = footprint.head_bytes + _active_share(footprint.facts) * footprint.draft_bytes
            self._dense += int(placement.job.draft * shared)

    def decode_s(self, context: int, sequences: int) -> float:
        """One step of `sequences` requests that hold `context` tokens each."""
        job = self._placement.job
        fixed = self._dense + 2 * sequences * self._footprint.snapshot_bytes
        rows = sequences * (1 + job.draft)
        compute = 2 * rows * self._footprint.active_params / self.speed.products
        read = fixed / self.speed.dense + sequences * self._kv_s(context) + self._units_s(rows)
        return max(read, compute) + self._kernels_s + sequences * self.speed.sequence_s

    def prefill_s(self, num_tokens: int) -> float:
        """Reading a prompt: products, attention and delta rule, with what is streamed behind them."""
        where = self._placement
        # Every sub-chunk reads what lies in host memory of the KV before it: half of it on average.
        host_kv = num_tokens - min(num_tokens, where.job.device_kv)
        once_more = host_kv / where.chunk_len * self._kv_s(num_tokens, outside=True) / 2
        sweeps = ceil_div(num_tokens, where.sweep_len)
        return max(self._compute_s(0, num_tokens), sweeps * self._stream_s() + once_more)

    def tail_s(self, context: int, num_tokens: int = QUESTION_LEN) -> float:
        """A follow-up of so many tokens after `context` tokens, to its first token."""
        work = max(self._compute_s(context, num_tokens), self._stream_s())
        return work + self._kv_s(context) + self._kernels_s

    def _compute_s(self, start: int, num_tokens: int) -> float:
        """What a card computes and moves of its own memory for tokens start .. start + num_tokens. Layers on several
        cards follow one another: prompts fill the cards in turn."""
        speed, footprint = self.speed, self._footprint
        flops = prefill_parts(footprint, start, num_tokens)
        attention = speed.attention if num_tokens >= LONG_PROMPT else speed.short_attention
        seconds = (
            flops["products"] / speed.products
            + flops["experts"] / speed.expert_products
            + flops["attention"] / attention
            + flops["delta"] / speed.delta
        )
        if footprint.num_cards == 0:
            return seconds
        moved = sum(prefill_bytes(footprint, self._placement, speed, num_tokens).values())
        decoded = self._decoded_experts(num_tokens) / speed.expert_values
        sending = ceil_div(num_tokens, self._placement.chunk_len) * self.facts.num_layers * speed.chunk_s
        return max((seconds + moved / speed.dense + decoded) / footprint.num_cards, sending)

    def _decoded_experts(self, num_tokens: int) -> float:
        """Values of packed experts that a prompt's chunks touch, each once a chunk."""
        moe, chunk = self.facts.moe, self._placement.chunk_len
        if moe is None or not self._footprint.recipe.is_packed:
            return 0.0
        values = self._footprint.expert_params * moe.num_experts / moe.top_k
        whole, rest = divmod(num_tokens, chunk)
        return values * (whole * touched_share(self.facts, chunk) + touched_share(self.facts, rest))

    def _stream_s(self) -> float:
        """Bringing once, over the link or from a disk, what does not stay on the card while a prompt is read."""
        where = self._placement
        streamed = (where.num_units - where.kept) * self._footprint.unit_bytes
        from_disk = max(0, where.num_units - where.kept - where.in_host) * self._footprint.unit_bytes
        return streamed / self.speed.copies + from_disk / self.speed.drive

    def _kv_s(self, context: int, *, outside: bool = False) -> float:
        """Reading the KV of `context` tokens once, or only the part of it outside the card."""
        job = self._placement.job
        inside = min(context, job.device_kv)
        per_token = account.kv_token_bytes(self.facts, job.kv)
        seconds = (context - inside) * per_token / self.speed.link
        return seconds if outside else seconds + inside * per_token / self.speed.kv_rate(job.kv)

    def _units_s(self, rows: int) -> float:
        """Reading, once each, the moving units that `rows` tokens touch, wherever they are."""
        where, footprint = self._placement, self._footprint
        touched = touched_share(self.facts, rows)
        inside = self.speed.dense if self.facts.moe is None else self.speed.experts
        if footprint.num_cards == 0:
            return touched * footprint.classes.get(footprint.mover, 0) / inside
        size = touched * footprint.unit_bytes
        outside = where.num_units - where.on_device
        from_disk = max(0, outside - where.in_host)
        seconds = size * where.on_device / inside + size * outside / self.speed.link
        return seconds + size * from_disk / self.speed.drive


def step_kernels(facts: ModelFacts) -> int:
    """Kernels of a captured decode step: of each layer's norms, mixer (projections, K and V or state, attention in two)
    and experts or MLP, of what comes before and after the layers."""
    mixers = 5 * facts.num_full_layers + 4 * facts.num_linear_layers
    num_moe = sum(facts.moe_layers)
    return 2 * facts.num_layers + mixers + 4 * num_moe + 2 * (facts.num_layers - num_moe) + 11


def touched_share(facts: ModelFacts, rows: int) -> float:
    """Part of the routed experts that `rows` tokens touch, each with uniform routing; 1 without experts."""
    moe = facts.moe
    return 1.0 if moe is None else 1.0 - (1.0 - moe.top_k / moe.num_experts) ** rows


def dense_bytes(footprint: Footprint) -> int:
    """Weights that every step reads wherever tokens go: all but embeddings and what moves."""
    left_out = {"embeddings", "lm_head", footprint.mover}
    kept = sum(size for kind, size in footprint.classes.items() if kind not in left_out)
    return kept + footprint.head_bytes


def _active_share(facts: ModelFacts) -> float:
    """Part of a draft layer's bytes that one guess reads."""
    return 1.0 if facts.moe is None else 2 * facts.moe.top_k / facts.moe.num_experts


def prefill_parts(footprint: Footprint, start: int, num_tokens: int) -> dict[str, int]:
    """Operations of reading tokens start .. start + num_tokens, with the logits of the last one: of `products` outside
    routed experts, these `experts`, `attention` and `delta` rule."""
    facts, delta = footprint.facts, footprint.facts.delta
    experts = footprint.expert_params
    attention = cost.causal_attention_flops(start, num_tokens, facts.num_heads, facts.head_dim)
    rule = 0
    if delta is not None:
        rule = cost.delta_rule_flops(num_tokens, delta.num_v_heads, delta.k_head_dim, delta.v_head_dim)
    head = 2 * facts.vocab_size * facts.hidden_size
    return {
        "products": 2 * num_tokens * (footprint.body_params - experts) + head,
        "experts": 2 * num_tokens * experts,
        "attention": facts.num_full_layers * attention,
        "delta": facts.num_linear_layers * rule,
    }


def prefill_bytes(footprint: Footprint, where: Placement, speed: Speed, num_tokens: int) -> dict[str, float]:
    """Bytes of cards' memory that reading so many tokens moves: of `weights`, which each chunk reads, and the values of
    packed ones outside experts writes and reads; of `rows`, which pass through each layer."""
    chunks = ceil_div(num_tokens, where.chunk_len)
    rows = account.activation_bytes(footprint.facts, num_tokens) // 2
    return {
        "weights": chunks * (footprint.layer_bytes + 4 * footprint.packed_values),
        "rows": speed.row_passes * footprint.facts.num_layers * rows,
    }


def prefill_flops(footprint: Footprint, start: int, num_tokens: int) -> int:
    """All of them."""
    return sum(prefill_parts(footprint, start, num_tokens).values())
