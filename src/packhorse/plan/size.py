"""How large the pools are: settings, model and machine in, byte counts out. Pure Python.

    memory of the device | weights | KV pages | states | working space | expert slots, layer buffers | runtime |
    host memory of a card| the embedding | every routed expert, where not all find room on the card |

All is decided before a byte of weights is read; what does not fit is refused with both numbers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from packhorse.core.config import EngineConfig
from packhorse.core.cost import CPU_UNPACK_BYTES, UNPACK_BYTES, attention_flops
from packhorse.core.errors import DoesNotFitError, PromptTooLongError, UsageError
from packhorse.core.formats import check_kv_heads
from packhorse.core.types import EXACT_ROWS, TAIL_LEN
from packhorse.core.units import GIB, MIB, ceil_div, format_bytes, round_up
from packhorse.facts.model import ModelFacts
from packhorse.facts.packed import packed_matrices
from packhorse.plan import account

LEFT_ALONE = account.PROCESS_BYTES
SCORES_BYTES = 256 * MIB
"""What attention's scores may take at once on a card, where the reference kernel writes them out."""
SPARES = 2
"""Experts that each layer may keep in one step of those it read over the link: each is written to the card once."""
CHUNK_LEN, LONGEST_CHUNK = 1024, 8192
"""Prompt tokens of a step on a CPU, and at most on a card, where nothing else was asked for."""
CHUNK_SHARE = 6
"""On a card its working space takes one part in so many of the memory at most."""
ATTENTION_SHARE = 0.33
"""What attention of many tokens reaches of a card's rate of products, at least."""
SM_FLOPS = {75: 0.79e12, 80: 2.89e12, 86: 0.87e12, 89: 1.29e12, 90: 7.5e12, 100: 15e12, 120: 1.23e12}
"""Dense products in 16 bits with fp32 sums, a second and multiprocessor, by compute capability: from the makers'
figures for whole cards. Of one between two, the lower's."""
SWEEP_LEN = 65_536
"""Tokens of a sweep where weights are streamed and nothing else was asked for."""
JOINED_SEGMENTS = 8
"""Of keys, that few queries on a card read at once at most."""
SWEEP_CHUNKS = 2
"""Chunks of a sweep where all weights lie on a card: enough for others to go on between units of one layer."""
SWEEP_SHARE = 2
"""One part in so many of the room for experts is then for the residuals of a sweep at most: between prompts experts
live there too."""
SCORES_COPIES = 4
"""Tensors of their size that live at once there: scores, mask, shifted, exponentials."""


@dataclass(frozen=True)
class Sizes:
    """What the engine allocates. kv: the codec of K and V. context: tokens one request may hold. chunk_len: prompt
    tokens of a step. segment_len: keys attention reads at once; None is the store's own choice. joined_segments: of
    these, that few queries read at once. expert_slots: routed experts that the card holds at once, None where it holds
    all or there are none; expert_bytes: these slots and the buffers of two layers.
    sweep_len: tokens of a sweep, 0 where prompts are not read in sweeps; workspace_bytes has its residuals.
    host_bytes: of a card's weights that lie in host memory, pinned_bytes the experts of them. runtime_bytes: what
    the device takes beside all this. notes: what was decided that a person may not expect."""

    dtype: str
    kv: str
    context: int
    num_pages: int
    weight_bytes: int
    page_bytes: int
    state_bytes: int
    workspace_bytes: int
    chunk_len: int = CHUNK_LEN
    segment_len: int | None = None
    joined_segments: int = 1
    packed: bool = False
    expert_slots: int | None = None
    expert_bytes: int = 0
    sweep_len: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
    runtime_bytes: int = LEFT_ALONE
    notes: tuple[str, ...] = ()

    @property
    def kv_bytes(self) -> int:
        """All pages, over all layers."""
        return self.num_pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """Everything planned on the device but the runtime."""
        fixed = self.weight_bytes + self.state_bytes + self.workspace_bytes
        return fixed + self.kv_bytes + self.expert_bytes

    @property
    def device_bytes(self) -> int:
        """Everything planned on the device."""
        return self.total_bytes + self.runtime_bytes


def check_window(facts: ModelFacts, config: EngineConfig, max_tokens: int | None = None) -> None:
    """What the model's window alone rules out, so that it is said before anything is loaded.

    Raises DoesNotFitError for a context beyond it, PromptTooLongError where `max_tokens` leave no room for a
    prompt.
    """
    window = facts.context
    if config.context is not None and config.context > window:
        raise DoesNotFitError(
            f"A context of {config.context:,} tokens was asked for, and the model's window is {window:,}.",
            asked=config.context,
            available=window,
            unit="tokens",
            hint="Ask for less, or set YaRN in the model's config.json as its card describes.",
        )
    context = config.context or window
    if max_tokens is not None and max_tokens >= context:
        raise PromptTooLongError(
            f"max_tokens {max_tokens:,} leave no room for a prompt: the window holds {context:,}.",
            asked=max_tokens + 1,
            available=context,
            unit="tokens",
            hint=f"Give max_tokens of at most {context - 1:,}"
            + (f", or raise the context to at most {window:,}." if context < window else "."),
        )


def size_engine(
    facts: ModelFacts,
    config: EngineConfig,
    dtype: str,
    available_bytes: int,
    host_bytes: int | None = None,
    runtime_bytes: int | None = None,
    flops: float | None = None,
) -> Sizes:
    """The pools of an engine that may take `available_bytes` of its device's memory and, beside a card, `host_bytes`
    of host memory (None: as much as it wants). runtime_bytes: what the device takes beside; None: as calibrated.
    flops: dense 16-bit products of the card, a second; None: not known, and chunks are short.

    A context or KV pool that was asked for is given or refused; one that was not asked for is cut to what
    fits, and `notes` says so.

    Raises DoesNotFitError with both numbers, UsageError where the model's heads do not suit the KV codec, or packed
    weights were asked for and there are none.
    """
    check_window(facts, config)
    kv = config.kv
    if kv == "auto":
        kv = dtype if config.device == "cpu" or dtype == "fp32" else "fp8"
    check_kv_heads(kv, facts.head_dim)
    caps = available_bytes, host_bytes, runtime_bytes
    longest = choose_chunk_len(facts, config, dtype, kv, available_bytes, flops)
    shortest = longest
    if config.chunk_len is None:
        shortest = min(longest, max(1, CHUNK_LEN // config.page_len) * config.page_len)
    found = _size(facts, replace(config, chunk_len=shortest), dtype, kv, *caps)
    # Long chunks are worth some room, but neither a refusal nor weights that could lie on the card.
    while longest > shortest:
        with suppress(DoesNotFitError):
            longer = _size(facts, replace(config, chunk_len=longest), dtype, kv, *caps)
            if longer.expert_slots is None or found.expert_slots is not None:
                return longer
        longest = max(1, longest // 2 // config.page_len) * config.page_len
    return found


def _size(
    facts: ModelFacts,
    config: EngineConfig,
    dtype: str,
    kv: str,
    available_bytes: int,
    host_bytes: int | None,
    runtime_bytes: int | None,
) -> Sizes:
    """As `size_engine`, with chunks as config has them."""
    page_bytes = facts.num_full_layers * account.kv_page_bytes(facts, kv, config.page_len)
    sweep_len = min(config.sweep_len or 0, _longest_sweep(facts, config))
    fixed = Sizes(
        dtype=dtype,
        kv=kv,
        context=config.context or facts.context,
        num_pages=0,
        weight_bytes=0,
        page_bytes=page_bytes,
        state_bytes=_state_bytes(facts, config, dtype),
        workspace_bytes=workspace_bytes(facts, config, dtype, kv) + _sweep_bytes(facts, config, sweep_len),
        sweep_len=sweep_len,
        chunk_len=_chunk(config),
        segment_len=_segment_len(facts, config, dtype),
        joined_segments=_joined_segments(facts, config, dtype, kv),
    )
    if config.device != "cpu":
        fixed = replace(fixed, runtime_bytes=runtime_bytes or account.runtime_bytes())
    room = available_bytes - fixed.runtime_bytes - fixed.total_bytes
    pages = ceil_div(config.kv_tokens or config.context or 1, config.page_len) * page_bytes
    packed, note = _keep_packed(facts, config, dtype, room - pages)
    cpu = config.device == "cpu" and not config.exact
    weight_bytes = account.weight_bytes(facts, dtype, packed=packed, cpu=cpu)
    fixed = replace(fixed, packed=packed, weight_bytes=weight_bytes, notes=note)
    if config.device != "cpu":
        embedding = account.embedding_bytes(facts, dtype, packed=packed)
        fixed = replace(fixed, weight_bytes=weight_bytes - embedding, host_bytes=embedding)
        if packed and fixed.weight_bytes + pages > room:
            fixed = _stream_experts(facts, config, fixed, room)
        if fixed.expert_slots is None and config.sweep_len is None:
            fixed = _sweep_resident(facts, config, fixed, room - fixed.weight_bytes - pages)
        _check_host(fixed, host_bytes)
    room = available_bytes - fixed.runtime_bytes - fixed.total_bytes
    if room < page_bytes:
        needed = fixed.total_bytes + fixed.runtime_bytes + page_bytes
        raise DoesNotFitError(
            f"{facts.name} in {dtype} needs {format_bytes(needed)} before the first page of context, and "
            f"{format_bytes(available_bytes)} is available.",
            asked=needed,
            available=available_bytes,
            hint="Use a smaller model, compute in 16 bits (--dtype), or free memory.",
        )
    return _with_pages(facts, config, fixed, room)


def _stream_experts(facts: ModelFacts, config: EngineConfig, fixed: Sizes, room: int) -> Sizes:
    """The sizes with routed experts in host memory and slots on the card; `fixed` where experts cannot be streamed.
    room: bytes for weights, pages and experts. Raises DoesNotFitError where not even a layer's experts find room."""
    experts = account.packed_expert_bytes(facts)
    num_layers = sum(facts.moe_layers)
    if not experts or facts.moe is None:
        return fixed
    num_experts = num_layers * facts.moe.num_experts
    block, buffers = experts // num_experts, 2 * experts // num_layers
    context = config.kv_tokens or min(config.context or facts.context, facts.context)
    pages = ceil_div(context, config.page_len) * fixed.page_bytes
    weights, fewest = fixed.weight_bytes - experts, 2 * num_layers * SPARES
    least = weights + buffers + fewest * block
    if config.context is None and config.kv_tokens is None:
        # Nobody named a context: half of what is left is for pages, so that experts find room too. What is refused
        # below has no room for one page.
        pages = min(pages, max(fixed.page_bytes, (room - least) // 2))
        context = min(context, config.page_len)
    left = room - weights - buffers - pages
    sweep_len, residuals = fixed.sweep_len, 0
    if config.sweep_len is None:
        # Of what is beyond the fewest slots: so that the cap a refusal names is enough.
        sweep_len = _auto_sweep_len(facts, config, min(left // SWEEP_SHARE, left - fewest * block))
        residuals = _sweep_bytes(facts, config, sweep_len)
    slots = (left - residuals) // block
    if slots < fewest:
        needed = room + (fewest - slots) * block
        taken = fixed.runtime_bytes + fixed.state_bytes + fixed.workspace_bytes
        cap = format_bytes(round_up(needed + taken, GIB // 100))  # it is printed with two decimals
        raise DoesNotFitError(
            f"{facts.name} needs {format_bytes(needed + taken)} of the card's memory for weights, {context:,} tokens "
            f"of context and the experts of two layers, and {format_bytes(room + taken)} may be taken.",
            asked=needed + taken,
            available=room + taken,
            hint=f"Give --vram of at least {cap}, a shorter --context, or a smaller --kv.",
        )
    slots = min(slots, num_experts + num_layers * SPARES)
    # Each layer's spares are slots that wait for an expert.
    held = slots - num_layers * SPARES
    note = f"{held:,} of {num_experts:,} routed experts on the card, all in pinned host memory"
    if sweep_len:
        note += f"; long prompts are read in sweeps of {sweep_len:,} tokens"
    return replace(
        fixed, weight_bytes=weights, expert_slots=slots, expert_bytes=slots * block + buffers, sweep_len=sweep_len,
        workspace_bytes=fixed.workspace_bytes + residuals, pinned_bytes=experts,
        host_bytes=fixed.host_bytes + experts, notes=(*fixed.notes, note),
    )  # fmt: skip


def choose_chunk_len(
    facts: ModelFacts, config: EngineConfig, dtype: str, kv: str, available_bytes: int, flops: float | None
) -> int:
    """Prompt tokens of a step: as asked for, else the longest that keep attention over the whole context under half of
    `max_decode_gap` and the working space within its share of `available_bytes`. Halved from LONGEST_CHUNK down to
    CHUNK_LEN, in whole pages. flops: as for `size_engine`."""
    if config.chunk_len is not None:
        return config.chunk_len
    length = CHUNK_LEN if config.device == "cpu" or flops is None else LONGEST_CHUNK
    if config.sweep_len:
        length = min(length, config.sweep_len)
    context = min(config.context or facts.context, facts.context)
    while True:
        chunk = max(1, length // config.page_len) * config.page_len
        work = attention_flops(chunk, context, facts.num_heads, facts.head_dim)
        slow = work > ATTENTION_SHARE * (flops or 0.0) * config.max_decode_gap / 2
        size = workspace_bytes(facts, replace(config, chunk_len=chunk), dtype, kv)
        if length <= CHUNK_LEN or not (slow or size > available_bytes // CHUNK_SHARE):
            return chunk
        length = max(CHUNK_LEN, length // 2)


def card_flops(arch: int, num_sms: int) -> float:
    """Dense 16-bit products a second of a card of compute capability `arch` / 10."""
    known = max((found for found in SM_FLOPS if found <= arch), default=min(SM_FLOPS))
    return SM_FLOPS[known] * num_sms


def _chunk(config: EngineConfig) -> int:
    assert config.chunk_len is not None
    return config.chunk_len


def _sweep_resident(facts: ModelFacts, config: EngineConfig, fixed: Sizes, room: int) -> Sizes:
    """The sizes of a model that lies on the card as a whole, with short sweeps where their residuals find `room`."""
    sweep_len = min(SWEEP_CHUNKS * _chunk(config), _longest_sweep(facts, config))
    size = _sweep_bytes(facts, config, sweep_len)
    if size > room // SWEEP_SHARE:
        return fixed
    return replace(fixed, sweep_len=sweep_len, workspace_bytes=fixed.workspace_bytes + size)


def _longest_sweep(facts: ModelFacts, config: EngineConfig) -> int:
    """Tokens beyond which a sweep gains nothing: the window in whole chunks. 0: no prompt is long enough."""
    context = config.context or facts.context
    return round_up(context, _chunk(config)) if context > TAIL_LEN else 0


def _auto_sweep_len(facts: ModelFacts, config: EngineConfig, room: int) -> int:
    """The longest sweep worth its while whose residuals take no more than `room`."""
    sweep_len = min(SWEEP_LEN, _longest_sweep(facts, config))
    while sweep_len >= _chunk(config):
        if _sweep_bytes(facts, config, sweep_len) <= room:
            return sweep_len
        sweep_len //= 2
    return 0


def _sweep_bytes(facts: ModelFacts, config: EngineConfig, sweep_len: int) -> int:
    padding = 2 * EXACT_ROWS if sweep_len and config.exact else 0
    return account.residual_bytes(facts, sweep_len + padding)


def _check_host(sizes: Sizes, host_bytes: int | None) -> None:
    if host_bytes is not None and sizes.host_bytes > host_bytes:
        raise DoesNotFitError(
            f"{format_bytes(sizes.host_bytes)} of host memory are needed for weights that are not on the card, and "
            f"{format_bytes(host_bytes)} are available.",
            asked=sizes.host_bytes,
            available=host_bytes,
            hint="Free memory, lower --ram, raise --vram, or use a smaller recipe.",
        )


def _keep_packed(
    facts: ModelFacts, config: EngineConfig, dtype: str, room: int
) -> tuple[bool, tuple[str, ...]]:
    """Whether packed matrices stay packed, and a word on it. room: bytes that weights may take."""
    if not packed_matrices(facts):
        if config.weights == "packed":
            raise UsageError(
                f"Packed weights were asked for, and {facts.name} holds none that can stay packed.",
                hint="Leave out --weights, or choose a checkpoint in 4 to 8 bits.",
            )
        return False, ()
    plain = account.weight_bytes(facts, dtype)
    packed = config.weights == "packed" or (
        config.weights == "auto" and (config.device != "cpu" or plain > room)
    )
    if packed:
        return True, (f"weights stay packed: {account.listed_formats(facts)}",)
    less = account.weight_bytes(facts, dtype, packed=True)
    return False, (f"weights are unpacked to {dtype}; packed they would take {format_bytes(less)}",)


def _with_pages(facts: ModelFacts, config: EngineConfig, fixed: Sizes, room: int) -> Sizes:
    page_len, page_bytes = config.page_len, fixed.page_bytes
    fit = room // page_bytes if page_bytes else 2**31
    one = ceil_div(fixed.context, page_len)
    asked = config.kv_tokens or (fixed.context if config.context else 0)
    if ceil_div(asked, page_len) > fit:
        raise DoesNotFitError(
            f"{asked:,} tokens of context need {format_bytes(ceil_div(asked, page_len) * page_bytes)} of KV, "
            f"and {format_bytes(room)} is left beside the weights.",
            asked=ceil_div(asked, page_len) * page_bytes,
            available=room,
            hint=f"At most {fit * page_len:,} tokens fit: lower --context.",
        )
    if config.kv_tokens is not None and config.kv_tokens < (config.context or 0):
        raise DoesNotFitError(
            f"A context of {config.context:,} tokens was asked for, and a KV pool of {config.kv_tokens:,}.",
            asked=config.context or 0,
            available=config.kv_tokens,
            unit="tokens",
            hint="The pool holds at least one request: raise kv_tokens or lower the context.",
        )
    notes = fixed.notes
    if config.kv_tokens is not None:
        num_pages = ceil_div(config.kv_tokens, page_len)
    elif fixed.expert_slots is not None:
        # One context, which sequences share: every page more is an expert less.
        num_pages = min(fit, one)
    else:
        num_pages = min(fit, config.sequences * one)
    context = min(fixed.context, num_pages * page_len)
    if context < fixed.context:
        notes += (
            f"the window is {context:,} of the model's {fixed.context:,} tokens: "
            + (
                f"{format_bytes(room)} is left for KV"
                if config.kv_tokens is None
                else "the KV pool holds no more"
            ),
        )
    return Sizes(**{**vars(fixed), "num_pages": num_pages, "context": context, "notes": notes})


def _state_bytes(facts: ModelFacts, config: EngineConfig, dtype: str) -> int:
    """Recurrent states: active and rolling of each sequence, snapshots, and exact mode's pending rows."""
    if facts.delta is None:
        return 0
    states = 2 * config.sequences + config.snapshots
    pending = account.pending_bytes(facts, config.sequences, config.page_len) if config.exact else 0
    return states * account.snapshot_bytes(facts, dtype) + pending


def workspace_bytes(facts: ModelFacts, config: EngineConfig, dtype: str, kv: str) -> int:
    """Activations of a step, of which a few live at once in a layer, the logits, and K and V of a segment where they
    are decoded before attention reads them, and values of packed weights; on a card what its kernels pass on, on a CPU
    half as much again: aligned blocks leave gaps in the heap, which are not joined when they are freed."""
    total = _rows_bytes(facts, config, dtype) + account.logits_bytes(facts, config.sequences)
    if kv != dtype:
        total += _decode_bytes(facts, config, dtype, kv)
    if config.device != "cpu":
        total += account.delta_transient_bytes(facts, _chunk(config))
        total += account.split_bytes(facts, config.sequences) + account.graph_bytes(config.sequences)
    if packed_matrices(facts):
        total += CPU_UNPACK_BYTES if config.device == "cpu" else UNPACK_BYTES
    if config.device == "cpu":
        total += total // 2
    segment_len = _segment_len(facts, config, dtype)
    if segment_len is None:
        return total
    scores = SCORES_COPIES * 4 * facts.num_heads * _chunk(config) * segment_len
    keys = 3 * 4 * segment_len * 2 * facts.num_kv_heads * facts.head_dim
    return total + scores + keys


def _rows_bytes(facts: ModelFacts, config: EngineConfig, dtype: str) -> int:
    """Activations of a chunk and a token of each sequence."""
    rows = max(EXACT_ROWS, _chunk(config) + config.sequences)
    return (account.activation_bytes if _is_wide(config, dtype) else account.chunk_bytes)(facts, rows)


def _decode_bytes(facts: ModelFacts, config: EngineConfig, dtype: str, kv: str) -> int:
    return account.kv_decode_bytes(facts, account.SEGMENT_LEN, None if _is_wide(config, dtype) else kv)


def _is_wide(config: EngineConfig, dtype: str) -> bool:
    """Whether layers compute by reference kernels, whose fp32 values lie side by side."""
    return config.device == "cpu" or dtype == "fp32"


def _joined_segments(facts: ModelFacts, config: EngineConfig, dtype: str, kv: str) -> int:
    """Segments that few queries read at once, in the memory that the rows of a whole chunk would take."""
    if _is_wide(config, dtype) or not facts.num_full_layers:
        return 1
    room = _rows_bytes(facts, config, dtype)
    return max(1, min(JOINED_SEGMENTS, room // _decode_bytes(facts, config, dtype, kv)))


def _segment_len(facts: ModelFacts, config: EngineConfig, dtype: str) -> int | None:
    """Keys of a segment so that a chunk's scores stay within SCORES_BYTES; None where a library kernel writes none
    out: on the CPU, and on a card in 16 bits."""
    if config.device == "cpu" or dtype != "fp32":
        return None
    fit = SCORES_BYTES // (SCORES_COPIES * 4 * facts.num_heads * _chunk(config))
    return max(1, min(fit, account.SEGMENT_LEN) // config.page_len) * config.page_len
