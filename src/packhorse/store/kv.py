"""The store of KV pages and recurrent state: who may read and write what, and what is kept for later prompts.

    pages        | entries of the prefix tree (cached, shared) | owned by open sequences | free |
    state slots  | active: one an open sequence | rolling | snapshots of entries          | free |

A sequence takes everything its worst case needs when it opens, so an open sequence never waits and is never
preempted. Used from one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from packhorse.core.errors import DoesNotFitError, UsageError
from packhorse.core.protocols import KVView
from packhorse.core.types import Span
from packhorse.core.units import ceil_div
from packhorse.kernels import dispatch
from packhorse.kernels.attention.ref import EXACT_SEGMENT_LEN
from packhorse.quant.codec import Fp8Pages
from packhorse.store import resume
from packhorse.store.durable import MIN_TOKENS, DurableStore
from packhorse.store.evict import LeafQueue, spare_leaf, thinnable
from packhorse.store.lower import KeepJob, LowerTiers
from packhorse.store.pages import PageAllocator, consecutive_runs
from packhorse.store.prefix import Entry, PrefixMatch, PrefixTree, encode_tokens
from packhorse.store.resume import Resumable
from packhorse.store.snapshots import StateSlots, WantedSnapshot, wanted_positions
from packhorse.store.tier import ComputeTier, StoreGeometry
from packhorse.store.transfer import copy_layer_state, copy_state, zero_state
from packhorse.store.views import Fragment, PagesView, StateView, Step, join

SEGMENT_LEN = 8192
"""Tokens of a KV segment at most: attention's workspace grows with it, the number of merges falls."""
MAX_RUNS = 8
"""Runs of consecutive pages into which a segment is cut at most; with more of them it is gathered."""
FEW_QUERIES = 1024
"""Tokens up to which a span reads several segments at once, where the store allows it: then kernels are short, and
their number counts."""

_COUNTED = ("opened", "hits", "reused_tokens", "evicted_entries", "thinned_entries", "skipped_snapshots")


@dataclass(frozen=True)
class StoreStats:
    """Counts since construction (hits, reused_tokens, evicted_entries, thinned_entries, skipped_snapshots,
    opened) and as of now. A page is cached while an entry holds it, and used while only an open sequence
    does. snapshots: those of entries."""

    pages_free: int
    pages_used: int
    pages_cached: int
    entries: int
    snapshots: int
    open_sequences: int
    opened: int
    hits: int
    reused_tokens: int
    evicted_entries: int
    thinned_entries: int
    skipped_snapshots: int


class LayerMemory(NamedTuple):
    """One layer's part of the device. A full-attention layer: pages, uint8 [pages, page_bytes], and what its codec
    counts, int64 [2], if it does. A linear layer: conv [slots, C, K - 1], recurrent [slots, Hv, Dk, Dv]."""

    pages: Tensor | None
    misfits: Tensor | None
    conv: Tensor | None
    recurrent: Tensor | None


@dataclass(eq=False)
class StoredSequence:
    """An open sequence: the engine reads `slot`, `cached_len`, `position`, `token_ids` and `boundary_after`.

    slot: active state slot, 0 .. sequences. cached_len: tokens of the prompt that were already stored.
    position: tokens stored so far. token_ids: the prompt and every token completed since. keep: later prompts
    may find what it has read. label: a name for people of what lies on disk. swept: where its sweep ends, whose
    state the active one is when the sweep is over; 0 outside of one. collected: by position, the slots of
    snapshots that the layers of the sweep fill one after the other. joined: fragments for spans of few tokens, from the
    first of them on.
    """

    slot: int
    cached_len: int
    position: int
    prompt_len: int
    token_ids: list[int]
    encoded: bytearray = field(repr=False)
    page_ids: list[int] = field(repr=False)
    fragments: list[Fragment] = field(repr=False)
    wanted: list[WantedSnapshot]
    tip: Entry = field(repr=False)
    clock: int
    root: Entry = field(repr=False)
    keep: bool = True
    label: str = ""
    rolling: int | None = None
    rolling_position: int = 0
    in_step: bool = False
    swept: int = 0
    joined: list[Fragment] | None = field(default=None, repr=False)
    collected: dict[int, int] = field(default_factory=dict)
    is_open: bool = True

    @property
    def next_boundary(self) -> int | None:
        """The next position that is to be snapshot: no step may go across it. None: no such position."""
        return self.wanted[0].position if self.wanted else None

    def boundary_after(self, position: int) -> int | None:
        """The next such position after one."""
        return next((snap.position for snap in self.wanted if snap.position > position), None)


class KVStore:
    """Pages, states and prefixes of one model.

    num_pages: pages of each full-attention layer. sequences: open at once. snapshots: recurrent states kept
    for reuse. snapshot_len: their absolute grid, in tokens. exact: segments of a fixed shape, and room for
    pending rows. segment_len: None takes this module's default. joined: segments that spans of at most FEW_QUERIES
    tokens read at once. poison: free memory is NaN (tests). secret:
    keys the hash chain. seed: hashed into every chain, what the pages are of.

    before_taking, an attribute: called before pages are taken, so that who was lent `idle_pages` leaves them.

    Raises UsageError where a page is longer than a segment may be.
    """

    def __init__(
        self, geometry: StoreGeometry, *, num_pages: int, sequences: int, snapshots: int, snapshot_len: int,
        exact: bool = False, device: torch.device | str = "cpu", segment_len: int | None = None,
        joined: int = 1, poison: bool = False, secret: bytes = b"", seed: bytes = b"",
    ) -> None:  # fmt: skip
        page_len = geometry.page_len
        longest = EXACT_SEGMENT_LEN if exact else SEGMENT_LEN
        if page_len > longest:
            raise UsageError(
                f"A page of {page_len} tokens is longer than the {longest} that attention reads at once.",
                hint=f"Make page_len at most {longest}.",
            )
        if segment_len is None:
            segment_len = longest // page_len * page_len
        assert segment_len % page_len == 0 and snapshot_len % page_len == 0
        assert not exact or segment_len <= EXACT_SEGMENT_LEN
        self.geometry = geometry
        self.page_len = page_len
        self.snapshot_len = snapshot_len
        self.segment_len = segment_len
        self._joined = joined
        self.exact = exact
        self._slots = StateSlots(sequences, snapshots if geometry.is_hybrid else 0)
        self._tier = ComputeTier(
            geometry,
            num_pages=num_pages,
            num_state_slots=self._slots.num_slots,
            num_active=sequences,
            exact=exact,
            device=torch.device(device),
        )
        self._bound = {
            i: dispatch.bind_pages(geometry.codec, self._tier.pages(i)) for i in geometry.full_layers
        }
        self._pages = PageAllocator(num_pages)
        self.before_taking: Callable[[], None] | None = None
        self._tree = PrefixTree(page_len, secret, seed)
        self.lower: LowerTiers | None = None
        self._leaves = LeafQueue(self._tree)
        self._open: dict[int, StoredSequence] = {}
        self._clock = 0
        self._counters: Counter[str] = Counter()
        self._poison = poison
        if poison:
            self._tier.poison_pages(list(range(num_pages)))
            for slot in range(self._slots.num_slots):
                self._tier.poison_state(slot)

    def add_tiers(
        self,
        *,
        ram_bytes: int = 0,
        disk: DurableStore | None = None,
        model: int = 0,
        min_tokens: int = MIN_TOKENS,
    ) -> None:
        """Put host memory and a disk store below the device, before the first sequence. See LowerTiers."""
        assert not self._tree.entries and not self._open
        self.lower = LowerTiers(
            self._tier, self._tree.chain_value, self._tree.page_bytes, self._release,
            ram_bytes=ram_bytes, disk=disk, model=model, min_tokens=min_tokens,
        )  # fmt: skip

    @property
    def capacity(self) -> int:
        """Tokens that the empty store holds, and so the longest sequence."""
        return self._pages.num_pages * self.page_len

    @property
    def storage_bytes(self) -> Mapping[str, int]:
        """Bytes taken, by part: `pages`, `states`, `pending`."""
        return self._tier.storage_bytes

    @property
    def stats(self) -> StoreStats:
        """Counters and what is held right now."""
        free, cached = self._pages.num_free, self._tree.num_pages
        return StoreStats(
            pages_free=free, pages_used=self._pages.num_pages - free - cached, pages_cached=cached,
            entries=len(self._tree.entries), snapshots=self._slots.num_entries, open_sequences=len(self._open),
            **{name: self._counters[name] for name in _COUNTED},
        )  # fmt: skip

    def layer_memory(self, layer: int) -> LayerMemory:
        """What kernels of decode steps read and write of a layer, by page ids and state slots; valid as long as the
        store. What they change is completed as any step's is."""
        if layer in self._bound:
            bound = self._bound[layer]
            misfits = bound.misfits if isinstance(bound, Fp8Pages) else None
            return LayerMemory(self._tier.pages(layer), misfits, None, None)
        return LayerMemory(None, None, *self._tier.delta_pool(layer))

    def arrive(self, layer: int | None = None) -> None:
        """What the device is given from now on comes after what is still on its way into a layer's pages, and into
        those of the layers before it; None: into any. Views do that by themselves. Raises what a copy has raised."""
        if self.lower is not None:
            self.lower.arrive(layer)

    def idle_pages(self, layer: int) -> Tensor | None:
        """A full-attention layer's pages at the pool's end that nobody holds, uint8 [n, page_bytes]: of whoever asks
        until `before_taking` is called. None where there are none."""
        tail = self._pages.tail
        return self._tier.pages(layer)[tail.start :] if tail else None

    @property
    def kv_misfits(self) -> dict[str, int]:
        """Values written that their codec could not hold as they were, by kind, over all layers; a codec that
        has none to count gives nothing. Waits for the device."""
        totals: dict[str, int] = {}
        for pages in self._bound.values():
            for kind, count in pages.counts.items():
                totals[kind] = totals.get(kind, 0) + count
        return totals

    def match(self, token_ids: Sequence[int], tenant: bytes = b"") -> PrefixMatch:
        """What of a prompt is stored on the device now. Changes nothing."""
        return self._tree.match(encode_tokens(token_ids), tenant)

    def open(
        self,
        token_ids: Sequence[int],
        max_len: int,
        marks: Sequence[int] = (),
        *,
        reuse: bool = True,
        keep: bool = True,
        tenant: bytes = b"",
        label: str = "",
    ) -> StoredSequence | None:
        """Begin a sequence: pin what of its prompt is stored and reserve the rest of `max_len` tokens.

        Its active state is that at `cached_len`. Returns None, having changed nothing, while other sequences
        hold what it needs: ask again when one has closed. marks: positions in (0, len(token_ids)] whose
        last page boundary is to be snapshot. reuse: False reads the whole prompt again. keep: False leaves
        nothing of it behind. tenant: whose chains it may go on from and add to.

        Raises DoesNotFitError where the empty store could not hold `max_len` tokens.
        """
        assert 0 < len(token_ids) <= max_len
        if max_len > self.capacity:
            raise DoesNotFitError(
                f"The request needs room for {max_len:,} tokens, and the KV store holds {self.capacity:,}.",
                asked=max_len,
                available=self.capacity,
                unit="tokens",
                hint="Shorten the prompt, ask for fewer tokens, or give the store more (kv_tokens).",
            )
        if self._slots.num_active == self._slots.sequences:
            return None
        encoded = encode_tokens(token_ids)
        root = self._tree.root_of(tenant)
        match = self._tree.match(encoded, tenant) if reuse else PrefixMatch(0, (), None)
        reused = [page for entry in match.entries for page in entry.page_ids]
        missing = ceil_div(max_len, self.page_len) - len(reused)
        if self.lower is not None and self.lower.is_behind and missing > self._pages.num_free:
            self.lower.advance(1 << 62, wait=True)  # what waits to be written holds pages
        pinned_now = sum(len(entry.page_ids) for entry in match.entries if not entry.pins)
        if missing > self._pages.num_free + self._tree.unpinned_pages - pinned_now:
            return None
        if self.before_taking is not None:
            self.before_taking()
        tip = match.entries[-1] if match.entries else root
        tip.reused = True
        ends = {mark // self.page_len * self.page_len for mark in marks}
        for entry in match.entries:
            entry.marked |= entry.stop in ends
        self._clock += 1
        self._tree.pin(tip)
        self._tree.touch(tip, self._clock)
        while self._pages.num_free < missing:
            assert self._evict_leaf(), "admission counted pages that cannot be evicted"
        self._pages.share(reused)
        page_ids = reused + self._pages.allocate(missing, reused[-1] if reused else None)
        slot = self._slots.take_active()
        assert slot is not None
        sequence = StoredSequence(
            slot=slot, cached_len=match.length, position=match.length, prompt_len=len(token_ids),
            token_ids=list(token_ids), encoded=bytearray(encoded), page_ids=page_ids,
            fragments=self._fragments(page_ids), wanted=[], tip=tip, clock=self._clock, root=root, keep=keep,
            label=label,
        )  # fmt: skip
        self._open[slot] = sequence
        fork = match.fork
        if reuse and self.lower is not None:
            fork = max(fork or 0, self._promote(sequence, self.lower)) or None
        self._begin(sequence, fork, marks)
        return sequence

    def _begin(self, sequence: StoredSequence, fork: int | None, marks: Sequence[int]) -> None:
        """Give a sequence its state, unless it came with what was promoted, and the snapshots it shall make."""
        if sequence.position == sequence.tip.stop:
            self._restore(sequence.tip, sequence.slot)
        if self.geometry.is_hybrid and sequence.keep:
            sequence.wanted = wanted_positions(
                sequence.prompt_len, marks, fork, self.page_len, self.snapshot_len, sequence.position
            )
        self._counters["opened"] += 1
        self._counters["hits"] += sequence.cached_len > 0
        self._counters["reused_tokens"] += sequence.cached_len

    def views(self, spans: Sequence[Span]) -> list[KVView]:
        """What each layer of the model sees during one step, by layer index; valid until `complete`.

        Spans of one sequence follow on one another from its `position` and stay within its `max_len`. Layers
        change recurrent state in place, so a sequence that has it must be closed or rewound after a failed
        step.
        """
        step = Step(spans)
        reached: dict[int, int] = {}
        for span in spans:
            sequence = self._open[span.slot]
            if span.slot not in reached:
                assert not (sequence.in_step and self.geometry.is_hybrid), "a step was not completed"
                sequence.in_step = True
            assert span.position == reached.get(span.slot, sequence.position), "a span leaves a gap"
            assert span.end <= len(sequence.page_ids) * self.page_len, "a span goes beyond max_len"
            reached[span.slot] = span.end
            first = span.position // self.page_len
            page_ids = sequence.page_ids[first : ceil_div(span.end, self.page_len)]
            runs = consecutive_runs(page_ids)
            target = runs[0] if len(runs) == 1 else page_ids
            step.targets[span.row] = (target, span.position - first * self.page_len)
            if self._joined > 1 and span.length <= FEW_QUERIES:
                if sequence.joined is None:  # once: a step has no time for thousands of pages
                    sequence.joined = join(sequence.fragments, self._joined)
                step.fragments[span.row] = sequence.joined
            else:
                step.fragments[span.row] = sequence.fragments
        layers = range(len(self.geometry.layer_kinds))
        return [
            PagesView(step, self._bound[i], self.geometry.codec.format.rotated, partial(self.arrive, i))
            if i in self._bound
            else StateView(step, self._tier.delta_states(i))
            for i in layers
        ]

    def begin_sweep(self, spans: Sequence[Span]) -> list[KVView]:
        """`views` of spans that pass one layer after the other, whose ends may lie beyond `next_boundary`.

        Takes slots for the snapshots that are wanted at ends of spans: `collect` fills them. When all layers have
        passed a sequence, its spans are completed one by one, each up to such an end.
        """
        views = self.views(spans)
        wanted: list[tuple[StoredSequence, WantedSnapshot]] = []
        for slot, end in {span.slot: span.end for span in spans}.items():
            sequence = self._open[slot]
            sequence.swept = end
            wanted += [(sequence, snap) for snap in sequence.wanted if snap.position <= end]
        # Those of the grid last, and nothing but the grid makes room for them.
        for sequence, snap in sorted(wanted, key=lambda pair: (not pair[1].marked, -pair[1].position)):
            if self._slots.entry_available or self._reclaim_snapshot(grid_only=not snap.marked):
                sequence.collected[snap.position] = self._slots.take_entry()
        return views

    def collect(self, layer: int, span: Span) -> None:
        """A layer has passed a span of a sweep: keep its state there, if a snapshot is."""
        slot = self._open[span.slot].collected.get(span.end)
        if slot is not None and layer not in self._bound:
            copy_layer_state(self._tier, span.slot, slot, self.geometry.state_part(layer))

    def keep_sweep(
        self, sequence: StoredSequence, ends: Sequence[int], at: tuple[int, int], hidden: Tensor
    ) -> None:
        """A sequence is to be closed in the middle of a sweep: keep in host memory what has been done of it. See
        store.resume.save."""
        if self.lower is not None and sequence.keep and self.lower.ram.capacity:
            kept = resume.save(self._tier, self.lower.ram, sequence, ends, at, hidden)
            self.lower.counters["kept_sweeps" if kept else "skipped_sweeps"] += 1

    def find_sweep(self, sequence: StoredSequence, ends: Sequence[int]) -> Resumable | None:
        """What a cancelled sweep had done of a sequence that is about to be swept. See store.resume.find."""
        if self.lower is None or not sequence.keep:
            return None
        return resume.find(self.geometry, self.lower.ram, sequence, ends)

    def resume_sweep(self, sequence: StoredSequence, found: Resumable, hidden: Tensor) -> None:
        """Bring that back, after `begin_sweep`. hidden: takes the residuals of the sequence's rows."""
        assert self.lower is not None
        for position in resume.load(self._tier, found, sequence, sequence.swept, hidden):
            self._free_slot(sequence.collected.pop(position))
        self.lower.counters["resumed_sweeps"] += 1

    def complete(self, spans: Sequence[Span], token_ids: Mapping[int, Sequence[int]]) -> None:
        """A step has passed all layers: its tokens are stored, and boundaries it reached are kept.

        token_ids: by slot, the ids of the tokens of its spans. Where no snapshot slot can be had the snapshot
        is left out and counted.
        """
        reached = {span.slot: span.end for span in spans}
        for slot, end in reached.items():
            sequence = self._open[slot]
            new = token_ids[slot]
            assert len(new) == end - sequence.position
            known = len(sequence.token_ids) - sequence.position
            assert list(new[:known]) == sequence.token_ids[sequence.position : end][:known]
            sequence.token_ids += new[known:]
            sequence.encoded += encode_tokens(new[known:])
            sequence.position = end
            sequence.in_step = end < sequence.swept
            if sequence.keep and self.geometry.is_hybrid:
                self._keep_snapshots(sequence)
            elif sequence.keep:
                for stop in range(sequence.tip.stop + self.page_len, end + 1, self.page_len):
                    self._keep(sequence, stop, marked=False)
            if not sequence.in_step:
                self._end_sweep(sequence)

    def rewind(self, sequence: StoredSequence) -> None:
        """After a failed step, or one of a sweep: go back to the last position whose recurrent state is kept, which is
        `position` then.

        Without recurrent state that is where the step began.
        """
        sequence.in_step = False
        self._end_sweep(sequence)
        if not self.geometry.is_hybrid:
            return
        if sequence.rolling is not None and sequence.rolling_position > sequence.tip.stop:
            copy_state(self._tier, sequence.rolling, self._tier, sequence.slot)
            sequence.position = sequence.rolling_position
        else:
            self._restore(sequence.tip, sequence.slot)
            sequence.position = sequence.tip.stop

    def close(self, sequence: StoredSequence, *, keep: bool = True) -> None:
        """End a sequence: at once, all it held is free or kept for later prompts.

        keep: a model with recurrent state keeps the last page boundary whose state there is, so that a
        following turn goes on from there. False is for one that failed, whose pages may hold anything: all
        that it wrote or read is dropped, with what was built on it, as far as no other open sequence uses it.
        One that does either is well, and so are those pages, or fails in its turn and drops the rest.
        """
        assert sequence.is_open and self._open.get(sequence.slot) is sequence, "closed twice"
        if keep and sequence.keep and self.geometry.is_hybrid:
            self._keep_turn(sequence)
        if keep and sequence.keep and self.lower is not None:
            self._keep_below(sequence, self.lower)
        self._clock += 1
        self._tree.touch(sequence.tip, self._clock)
        self._tree.unpin(sequence.tip)
        self._leaves.offer(sequence.tip)
        if not keep:
            self._forget(sequence.tip)
        self._release(sequence.page_ids)
        if sequence.rolling is not None:
            self._slots.free_rolling(sequence.rolling)
            self._poison_state(sequence.rolling)
        self._end_sweep(sequence)
        self._slots.free_active(sequence.slot)
        self._poison_state(sequence.slot)
        del self._open[sequence.slot]
        sequence.is_open = False

    def clear(self) -> None:
        """Forget every entry that no open sequence uses, in host memory too."""
        while (leaf := self._leaves.pop()) is not None:
            self._drop(leaf)
            self._counters["evicted_entries"] += 1
        if self.lower is not None:
            self.lower.ram.clear()

    def close_tiers(self) -> None:
        """Write what waits for the disk, and let go of the tiers below the device."""
        if self.lower is not None:
            self.lower.close()
            self.lower = None

    def _promote(self, sequence: StoredSequence, lower: LowerTiers) -> int:
        """Bring back what the tiers below hold of a prompt beyond the device's part. Returns how far they agree
        with it, usable or not."""
        start, limit = sequence.position, (sequence.prompt_len - 1) // self.page_len
        agreed = 0
        while (held := sequence.position // self.page_len) < limit:
            found = lower.find(sequence.root.key, sequence.encoded, limit, held)
            agreed = found.agreed
            if found.num_pages <= held:
                lower.counters["miss_no_state" if agreed > held else "miss_absent"] += (
                    sequence.position == start
                )
                break
            if not lower.worth_loading(found, held):
                lower.counters["miss_slower"] += 1
                break
            loaded = lower.load(found, held, sequence.page_ids, sequence.slot)
            sequence.position = sequence.cached_len = loaded * self.page_len
        if sequence.position > start and sequence.keep:
            step = sequence.position - start if self.geometry.is_hybrid else self.page_len
            for stop in range(start + step, sequence.position + 1, step):
                self._keep(sequence, stop, marked=self.geometry.is_hybrid)
            sequence.tip.reused = True
        return agreed * self.page_len

    def _keep_below(self, sequence: StoredSequence, lower: LowerTiers) -> None:
        """Have what a sequence has read written to disk; its pages stay until they are copied."""
        stop = sequence.tip.stop
        page_ids = sequence.page_ids[: stop // self.page_len]
        entries = [e for e in self._tree.chain(sequence.tip) if e.marked and e.snapshot is not None]
        tokens = bytes(sequence.encoded[: len(page_ids) * self._tree.page_bytes])
        job = KeepJob(sequence.root.key, tokens, page_ids, entries, sequence.label)
        if lower.keep(job):
            self._pages.share(job.page_ids)

    def _restore(self, tip: Entry, slot: int) -> None:
        if not self.geometry.is_hybrid:
            return
        if tip.snapshot is None:
            assert tip.parent is None, "an entry without its snapshot"
            zero_state(self._tier, slot)
        else:
            copy_state(self._tier, tip.snapshot, self._tier, slot)

    def _fragments(self, page_ids: Sequence[int]) -> list[Fragment]:
        """`page_ids` cut at absolute multiples of the segment length, and where they are not consecutive.

        In exact mode cuts depend on positions alone, so a segment of several runs is gathered.
        """
        fragments = []
        segment_pages = self.segment_len // self.page_len
        for first in range(0, len(page_ids), segment_pages):
            segment = page_ids[first : first + segment_pages]
            runs: Sequence[Sequence[int]] = consecutive_runs(segment)
            if len(runs) > (1 if self.exact else MAX_RUNS):
                runs = [segment]
            start = first * self.page_len
            for run in runs:
                fragments.append(Fragment(start, len(run) * self.page_len, run))
                start += len(run) * self.page_len
        return fragments

    def _keep_snapshots(self, sequence: StoredSequence) -> None:
        position = sequence.position
        boundary = sequence.next_boundary
        assert boundary is None or position <= boundary, "a step went across a snapshot boundary"
        if position == boundary:
            self._keep(sequence, position, marked=sequence.wanted.pop(0).marked)
        elif position >= sequence.prompt_len and position % self.page_len == 0 and self._slots.snapshots:
            if sequence.rolling is None:
                sequence.rolling = self._slots.take_rolling()
            copy_state(self._tier, sequence.slot, self._tier, sequence.rolling)
            sequence.rolling_position = position

    def _keep_turn(self, sequence: StoredSequence) -> None:
        at_boundary = sequence.position % self.page_len == 0 and not sequence.in_step
        if at_boundary and sequence.position > sequence.tip.stop:
            self._keep(sequence, sequence.position, marked=True)
        elif sequence.rolling_position > sequence.tip.stop:
            self._keep(sequence, sequence.rolling_position, marked=True)

    def _keep(self, sequence: StoredSequence, stop: int, *, marked: bool) -> None:
        """Make what lies between the sequence's tip and `stop` an entry, if there is none yet."""
        self._move_tip(sequence, self._tree.descend(sequence.tip, sequence.encoded, stop))
        if sequence.tip.stop == stop:
            sequence.tip.marked |= marked
            return
        snapshot = None
        if self.geometry.is_hybrid and stop not in sequence.collected:
            gone = stop < sequence.swept
            if gone or not (self._slots.entry_available or self._reclaim_snapshot(sequence.tip, stop)):
                self._counters["skipped_snapshots"] += 1
                return
        if self.geometry.is_hybrid:
            snapshot = self._take_snapshot(sequence, stop)
        first = sequence.tip.stop // self.page_len
        inserted = self._tree.insert(
            sequence.tip,
            sequence.encoded,
            stop,
            sequence.page_ids[first : stop // self.page_len],
            snapshot,
            marked=marked,
            last_used=sequence.clock,
        )
        self._pages.share(inserted.kept)
        self._release(inserted.dropped)
        before = sequence.tip
        self._move_tip(sequence, inserted.entry)
        if self.geometry.is_hybrid and before.parent is not None and before.snapshot is None:
            self._tree.merge_into_child(before)  # it gave its snapshot up for this one

    def _move_tip(self, sequence: StoredSequence, tip: Entry) -> None:
        self._tree.pin(tip, above=sequence.tip)
        sequence.tip = tip

    def _take_snapshot(self, sequence: StoredSequence, position: int) -> int:
        """A state slot for an entry, with the sequence's state at `position`: collected, rolling or its own."""
        if position in sequence.collected:
            return sequence.collected.pop(position)
        if sequence.rolling is not None and sequence.rolling_position == position:
            slot, sequence.rolling = self._slots.promote(sequence.rolling), None
            return slot
        assert sequence.position == position
        slot = self._slots.take_entry()
        copy_state(self._tier, sequence.slot, self._tier, slot)
        return slot

    def _reclaim_snapshot(
        self, growing: Entry | None = None, grown: int = 0, *, grid_only: bool = False
    ) -> bool:
        """Free one snapshot slot: that of a grid position in a chain, else, unless `grid_only`, of one in a sweep,
        else a leaf's, else a mark's. growing: a tip that may give its up for the one at `grown` (see `thinnable`)."""
        thin = thinnable(self._tree, marked=False)
        if thin is None:
            if grid_only:
                return False
            if self._give_up_collected() or self._evict(spare_leaf(self._tree, self._clock)):
                return True
            thin = thinnable(self._tree, marked=True, growing=growing, grown=grown)
        if thin is None:
            return False
        self._counters["thinned_entries"] += 1
        self._free_snapshot(thin)
        if thin is growing:
            thin.snapshot = None
        else:
            self._tree.merge_into_child(thin)
        return True

    def _give_up_collected(self) -> bool:
        for sequence in self._open.values():
            for snap in sequence.wanted:
                if not snap.marked and snap.position in sequence.collected:
                    self._free_slot(sequence.collected.pop(snap.position))
                    return True
        return False

    def _end_sweep(self, sequence: StoredSequence) -> None:
        for slot in sequence.collected.values():
            self._free_slot(slot)
        sequence.collected.clear()
        sequence.swept = 0

    def _evict_leaf(self) -> bool:
        return self._evict(self._leaves.pop())

    def _evict(self, leaf: Entry | None) -> bool:
        if leaf is None:
            return False
        if self.lower is not None:
            self.lower.demote(leaf)
        self._drop(leaf)
        self._counters["evicted_entries"] += 1
        return True

    def _forget(self, tip: Entry) -> None:
        """Drop of a chain what is not in use, and all entries below that."""
        # Whoever pins an entry pins those above it: below an unpinned one nothing is in use.
        doomed = next((entry for entry in self._tree.chain(tip) if not entry.pins), None)
        below = [] if doomed is None else [doomed]
        for entry in below:
            below += [child for siblings in entry.children.values() for child in siblings]
        for entry in reversed(below):
            self._drop(entry)

    def _drop(self, leaf: Entry) -> None:
        self._tree.remove(leaf)
        assert leaf.parent is not None
        self._leaves.offer(leaf.parent)
        self._release(leaf.page_ids)
        self._free_snapshot(leaf)

    def _free_snapshot(self, entry: Entry) -> None:
        if entry.snapshot is not None:
            self._free_slot(entry.snapshot)

    def _free_slot(self, slot: int) -> None:
        self._slots.free_entry(slot)
        self._poison_state(slot)

    def _release(self, page_ids: Sequence[int]) -> None:
        if page_ids and self.lower is not None:
            self.lower.settle()
        freed = self._pages.release(page_ids)
        if self._poison and freed:
            self._tier.poison_pages(freed)

    def _poison_state(self, slot: int) -> None:
        if self._poison:
            self._tier.poison_state(slot)
