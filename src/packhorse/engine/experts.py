"""Routed experts of a model that has more of them than a card holds.

    host, pinned | every expert of every layer                            always valid
    card         | slots: the experts used last | two buffers of a layer, working space: or more experts
                 | address of each expert, what may be filled, what a step used

Decode steps follow the addresses, and keep in a slot what they read over the link (fill on read). Prompt chunks read
a layer's experts from a buffer, into which they are copied while the layer before computes; while no prompt is read,
the buffers, and what else prompts alone need, hold experts too. Letters: L layers with experts, E experts, S places a
layer that one step may fill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from packhorse.core.formats import LINE_BYTES
from packhorse.core.units import MIB, ceil_div
from packhorse.kernels.experts.cuda import (
    MAX_EXPERTS,
    MAX_TOP_K,
    NO_SLOT,
    ExpertFills,
    ExpertTable,
    apply_changes,
    new_counters,
)
from packhorse.models.experts import ExpertBlocks, join_shared
from packhorse.models.model import Model
from packhorse.plan.size import SPARES
from packhorse.quant.packed import PackedTensor, aligned_bytes
from packhorse.store.arena import PagedArena, PinnedArena
from packhorse.store.experts import ExpertCache, Ints, LateUpdates

QUIET_STEPS = 16
"""Decode steps without a prompt chunk after which the memory that prompts need is filled with experts."""
COPIES = 16
"""Experts that are copied beside one decode step, to be there for later ones."""
ROUND = 8 * COPIES
"""Experts that are shown to decode steps together, once all of them are there."""
KEPT_FREE = 128 * MIB
"""Of what the allocator holds free, what is left to decode steps."""
KEPT_FOR_TIERS = 384 * MIB
"""The same where pages may leave for a tier below: a layer's are gathered first."""
_PIECE = 64 * MIB
"""What is taken of the card's memory for experts at once, and given back at once."""
HOST = 1
"""Bit of an address that says that it is of host memory."""


def join_shared_experts(model: Model) -> None:
    """Have decode steps treat the shared expert as one more routed one, where it is made as these are."""
    blocks, moe = model.experts, model.facts.moe
    if blocks is not None and moe is not None and moe.shared_dim and moe.num_experts < MAX_EXPERTS:
        layers = [model.weights.layer(index).mlp for index in blocks.layout.layers]
        shared = join_shared(layers, blocks.layout, MAX_TOP_K, moe.top_k)
        model.experts = replace(blocks, shared=shared)


def resident_table(blocks: ExpertBlocks) -> ExpertTable:
    """The table of experts that all lie on the card."""
    return _table(blocks, _addresses(blocks).to(blocks.memory.device))


class StreamedExperts:
    """The experts of a model in host memory, some of them in `num_slots` slots on the card.

    The model's own stacks become views of the layer buffers. Streams: the calls of one thread, on its current
    stream; copies run on a stream of their own.
    """

    def __init__(self, model: Model, arena: PinnedArena, num_slots: int) -> None:
        blocks = model.experts
        assert blocks is not None and blocks.memory.data_ptr() == arena.bytes.data_ptr()
        layout, device = blocks.layout, torch.device(model.device)
        self.blocks, self.arena = blocks, arena
        self.cache = ExpertCache(len(layout.layers), layout.num_experts, num_slots, SPARES)
        self.slots = _Slots(num_slots, layout.block_bytes, model.device)
        self.given_back = 0
        home = _addresses(blocks, HOST).to(device)
        self.table = _table(blocks, home.clone(), ExpertFills.empty(home, SPARES))
        self._enter_slots()
        self.counters = new_counters(device)
        self._updates = _Updates(self.table, self.cache, self.slots, self.counters)
        self._buffers = _LayerBuffers(blocks, arena, device)
        self._guests = _Guests(self.table, self.cache, self._buffers, layout.block_bytes)
        self._quiet = 0
        for layer, expert in np.argwhere(self.cache.slots >= 0).tolist():
            self._buffers.fetch_expert(layer, expert, self.slots[int(self.cache.slots[layer, expert])])
        torch.cuda.current_stream().synchronize()
        _hand_out(model, self)

    @property
    def counts(self) -> dict[str, int]:
        """Experts that decode steps so far used (the shared one too), each once a layer and step, those of them that
        were read over the link, those that were kept, and those that left, as of a step ago; and slots given back."""
        used, _, _, host, kept = self._updates.counted()
        size = self.blocks.layout.block_bytes
        return {
            "used": used,
            "missed": host // size,
            "kept": kept // size,
            "left": self.cache.evictions,
            "given_back": self.given_back,
        }

    @property
    def held(self) -> dict[str, int]:
        """Experts that are on the card now: in slots of their own, and as guests where prompts need the memory."""
        return {"slots": int((self.cache.slots >= 0).sum()), "guests": self._guests.count}

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes of experts that crossed the link: misses of decode steps, layers for prompts, experts that came to
        stay in the layer buffers or at the start."""
        layout, copied = self.blocks.layout, self._buffers
        return {
            "decode": self._updates.counted()[3],
            "prompts": copied.num_layers * layout.layer_bytes,
            "copies": copied.num_experts * layout.block_bytes,
        }

    def begin_step(self) -> None:
        """Before a step's kernels: hands over what the host decided. Waits for the step before, which is over
        where its ids were read."""
        self._updates.begin()
        self._quiet += 1
        if self._quiet >= QUIET_STEPS:
            self._guests.invite(self._updates.on_their_way())

    def in_step(self) -> None:
        """The first kernel of a step, captured with it."""
        apply_changes(self.table)

    def end_step(self) -> None:
        """The last copies of a step, captured with it: what it used and filled."""
        self._updates.record()

    def after_step(self) -> None:
        """A step was sent: decide, while it runs, on what the step before it did."""
        self._updates.decide()

    def stage(self, number: int) -> tuple[PackedTensor, PackedTensor]:
        """gate_up and down of the `number`-th layer with experts, on the card: valid until the next but one layer is
        staged. The next layer is on its way after."""
        self.make_room()
        return self._buffers.stage(number)

    def sent(self, number: int) -> None:
        """All that reads the stacks of the layer has been sent: they need not stay longer."""
        self._buffers.sent(number)

    def lend(self, region: Callable[[], Tensor | None]) -> None:
        """Memory on the card that experts may have between prompts: contiguous, or None while it is in use."""
        self._guests.regions.append(region)

    def keep_free(self, size: int) -> None:
        """Bytes of the allocator's free memory that are never lent."""
        self._guests.kept_free = size

    def make_room(self) -> None:
        """Prompt rows are about to be computed: what was lent for experts is free again, in the stream's order."""
        self._quiet = 0
        self._guests.leave()

    def warm_up(self) -> None:
        """Between steps: have some guests come and leave, so that all that this loads is there before requests come."""
        torch.cuda.current_stream().synchronize()
        while self._guests.invite(self._updates.on_their_way()) and not self._guests.count:
            pass
        self.make_room()

    def few(self, number: int, ids: Tensor) -> ExpertTable:
        """A table of that layer alone, as it is now, for calls that keep nothing, whatever experts they need."""
        address = self.table.address[number : number + 1] & ~HOST
        return replace(self.table, address=address, fills=None)

    def give_back(self, size: int) -> int:
        """Between steps: the card has no memory left. Guests leave, and slots worth `size` bytes go, as far as decode
        steps can do without them; the experts in them are read from host memory again. Returns the bytes that are free
        then, or back with the driver: 0 where there was nothing to give."""
        torch.cuda.synchronize()  # nobody reads what is given back
        freed = self._guests.taken
        self.make_room()
        wanted = len(self.slots) - ceil_div(size, self.blocks.layout.block_bytes)
        kept = self.slots.whole(max(wanted, self.cache.spares.size))
        if kept < len(self.slots):
            gone = len(self.slots) - kept
            self.cache.shrink(kept)
            self._updates.restart()
            self._enter_slots()
            torch.cuda.synchronize()  # the table names them no more
            self.slots.cut(kept)
            self.given_back += gone
            freed += gone * self.blocks.layout.block_bytes
        torch.cuda.empty_cache()
        return freed

    def _enter_slots(self) -> None:
        """Have the table say, of all experts, what the cache says: a slot, or host memory."""
        assert self.table.fills is not None
        address = self.table.fills.home.to("cpu", copy=True)
        layer, expert = np.nonzero(self.cache.slots >= 0)
        held = self.slots.addresses[self.cache.slots[layer, expert]]
        address[torch.from_numpy(layer), torch.from_numpy(expert)] = torch.from_numpy(held)
        self.table.address.copy_(address)


class _Slots:
    """Places on the card for one expert each, in pieces that can be given back."""

    def __init__(self, count: int, block_bytes: int, device: str) -> None:
        self._len = max(1, _PIECE // block_bytes)  # of a piece
        sizes = [min(self._len, count - first) for first in range(0, count, self._len)]
        self._pieces = [aligned_bytes(size * block_bytes, device).view(size, -1) for size in sizes]
        self.addresses: Ints = np.array([slot.data_ptr() for slot in self], dtype=np.int64)

    def __len__(self) -> int:
        return sum(map(len, self._pieces))

    def __iter__(self) -> Iterator[Tensor]:
        return (slot for piece in self._pieces for slot in piece)

    def __getitem__(self, slot: int) -> Tensor:
        """uint8 [block_bytes]."""
        return self._pieces[slot // self._len][slot % self._len]

    def whole(self, count: int) -> int:
        """The least number of whole pieces' slots that is not below `count`."""
        return min(len(self), ceil_div(count, self._len) * self._len)

    def cut(self, count: int) -> None:
        """Keep `count`, see `whole`: the memory of the others goes to the allocator."""
        del self._pieces[ceil_div(count, self._len) :]
        self.addresses = self.addresses[:count]


class FetchedExperts:
    """The same where the card cannot read host memory: the experts that few tokens need are copied to slots before they
    are used, for which the host waits for each layer's router."""

    def __init__(self, model: Model, arena: PagedArena, num_slots: int) -> None:
        blocks = model.experts
        assert blocks is not None and blocks.memory.data_ptr() == arena.bytes.data_ptr()
        self.blocks, self.num_slots = blocks, num_slots
        self._used = self._missed = self._left = 0
        size = blocks.layout.block_bytes
        self._slots = aligned_bytes(num_slots * size, model.device).view(num_slots, size)
        self._buffers = _LayerBuffers(blocks, arena, torch.device(model.device))
        # Slots of (layer, expert), the one used longest ago first.
        self._slot_of: OrderedDict[tuple[int, int], int] = OrderedDict()
        _hand_out(model, self)

    @property
    def counts(self) -> dict[str, int]:
        """As StreamedExperts.counts, of calls for few tokens; whatever is missed is kept."""
        return {"used": self._used, "missed": self._missed, "kept": self._missed, "left": self._left}

    @property
    def held(self) -> dict[str, int]:
        """As StreamedExperts.held: none are guests."""
        return {"slots": len(self._slot_of), "guests": 0}

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes of experts that crossed the link: those that few tokens missed, and whole layers."""
        layout, copied = self.blocks.layout, self._buffers
        return {
            "decode": copied.num_experts * layout.block_bytes,
            "prompts": copied.num_layers * layout.layer_bytes,
        }

    def few(self, number: int, ids: Tensor) -> ExpertTable:
        """A table of that layer in which the experts `ids` are on the card."""
        layout, wanted = self.blocks.layout, ids.unique().tolist()
        address = torch.zeros(1, layout.num_experts, dtype=torch.int64)
        if len(wanted) > self.num_slots:
            first = self.stage(number)[0].data.data_ptr()
            address[0] = first + layout.block_bytes * torch.arange(layout.num_experts)
        else:
            for expert in wanted:
                address[0, expert] = self._slots[self._fetch(number, expert)].data_ptr()
        return _table(replace(self.blocks, shared=None), address.to(self._slots.device))

    def stage(self, number: int) -> tuple[PackedTensor, PackedTensor]:
        """As StreamedExperts.stage."""
        return self._buffers.stage(number)

    def sent(self, number: int) -> None:
        """As StreamedExperts.sent."""
        self._buffers.sent(number)

    def _fetch(self, layer: int, expert: int) -> int:
        slot = self._slot_of.pop((layer, expert), None)
        self._used += 1
        if slot is None:
            self._missed += 1
            full = len(self._slot_of) == self.num_slots
            self._left += full
            slot = self._slot_of.popitem(last=False)[1] if full else len(self._slot_of)
            # In the order of the stream: what read the slot before has been sent.
            self._buffers.fetch_expert(layer, expert, self._slots[slot])
        self._slot_of[layer, expert] = slot
        return slot


def _hand_out(model: Model, experts: StreamedExperts | FetchedExperts) -> None:
    """Give each layer's weights the stacks that are fetched when they are asked for."""
    for number, index in enumerate(experts.blocks.layout.layers):
        model.weights.layer(index).mlp.experts = _StagedStacks(experts, number)


@dataclass(frozen=True)
class _StagedStacks:
    """What a layer's weights have as `experts`: stacks that are fetched when they are asked for."""

    experts: StreamedExperts | FetchedExperts
    number: int

    def few(self, ids: Tensor) -> ExpertTable:
        """A table of this layer for few tokens, which go to `ids`."""
        return self.experts.few(self.number, ids)

    def sent(self) -> None:
        """The stacks have been read, in the stream's order."""
        self.experts.sent(self.number)

    @property
    def gate_up_proj(self) -> PackedTensor:
        return self.experts.stage(self.number)[0]

    @property
    def down_proj(self) -> PackedTensor:
        return self.experts.stage(self.number)[1]


class _Updates:
    """Carries the host's decisions to the card and what steps did back."""

    def __init__(self, table: ExpertTable, cache: ExpertCache, slots: _Slots, counters: Tensor) -> None:
        assert table.fills is not None
        self._counters, self._counted = counters, torch.zeros_like(counters, device="cpu").pin_memory()
        self._fills, self._row_len = table.fills, table.address.shape[1]
        self._cache, self._slots = cache, slots
        self._late = LateUpdates(cache, self._row_len)
        self._used = torch.full_like(self._fills.used, -1, device="cpu").pin_memory()
        self._filled = torch.full_like(self._fills.filled, -1, device="cpu").pin_memory()
        self._rows = torch.full_like(self._fills.changes, -1, device="cpu").pin_memory()
        self._over = torch.cuda.Event()
        self._running = False

    def begin(self) -> None:
        step = None
        if self._running:
            self._over.synchronize()
            used = self._used.numpy().astype(np.int64)
            used[used >= self._cache.num_experts] = -1  # the shared one
            step = used, self._filled.numpy().astype(np.int64)
        rows = self._late.begin(step)
        rows[:, 2] = np.where(rows[:, 1] >= 0, self._slots.addresses[rows[:, 2]], -1)
        self._rows.numpy()[:] = rows
        self._fills.changes.copy_(self._rows, non_blocking=True)

    def restart(self) -> None:
        """As at first: no place has a slot. What the last step filled is forgotten."""
        self._late = LateUpdates(self._cache, self._row_len)
        self._running = False
        self._filled.fill_(-1)
        self._fills.filled.fill_(NO_SLOT)

    def on_their_way(self) -> Ints:
        """Experts [n, 2] whose entries the coming step writes: those that the step before was to keep have a slot from
        then on, those that leave have none."""
        layer, place = np.nonzero(self._filled.numpy() >= 0)
        kept = np.stack((layer, self._filled.numpy()[layer, place].astype(np.int64)), axis=1)
        return np.concatenate((kept, self._late.leaving))

    def record(self) -> None:
        self._used.copy_(self._fills.used, non_blocking=True)
        self._filled.copy_(self._fills.filled, non_blocking=True)
        self._counted.copy_(self._counters, non_blocking=True)

    def counted(self) -> list[int]:
        """The kernels' counters when the last step ended, or the one before."""
        return self._counted.tolist()

    def decide(self) -> None:
        self._over.record()
        self._running = True
        self._late.decide()


class _Guests:
    """Experts in memory that prompts need, while none is read: the layer buffers, lent regions, and what the allocator
    holds free. They come by copies, some at a time, and leave at once."""

    def __init__(
        self, table: ExpertTable, cache: ExpertCache, buffers: _LayerBuffers, block_bytes: int
    ) -> None:
        assert table.fills is not None
        self._address, self._home = table.address.view(-1), table.fills.home.view(-1)
        self._row_len, self._block_bytes = table.address.shape[1], block_bytes
        self._cache, self._buffers = cache, buffers
        self.regions: list[Callable[[], Tensor | None]] = []
        self.kept_free = KEPT_FREE
        # Places that nobody has been invited to yet; None: not looked for since the last prompt.
        self._places: list[Tensor] | None = None
        self._free: list[Tensor] = []
        self._coming: tuple[Ints, Ints] | None = None
        self._waiting: list[tuple[list[int], Tensor]] = []
        # Entries of the table that point at guests.
        self._here: list[Ints] = []
        self._arrived = torch.cuda.Event()

    @property
    def count(self) -> int:
        """Guests that steps find."""
        return sum(len(entries) for entries in self._here)

    @property
    def taken(self) -> int:
        """Bytes of the allocator's free memory that they have."""
        return sum(piece.numel() for piece in self._free)

    def invite(self, but: Ints) -> bool:
        """Copy a few more experts of a round, or, once all of it are there, show them to the next step. but: experts
        [n, 2] whose entries that step writes. False where nobody more can come."""
        if self._coming is None:
            self._waiting = self._next_round(but)
            if not self._waiting:
                return False
        if self._waiting:
            with self._buffers.copying(self._arrived):
                for (layer, expert), place in self._waiting[:COPIES]:
                    self._buffers.fetch_expert(layer, expert, place)
            del self._waiting[:COPIES]
        elif self._arrived.query():
            self._show(but)
        return True

    def leave(self) -> None:
        """The memory is needed: entries point at the host copies again, and copies on their way end first."""
        if self._here:
            entries = torch.from_numpy(np.concatenate(self._here)).to(self._address.device)
            self._address.index_copy_(0, entries, self._home[entries])
        if self._coming is not None:
            self._arrived.wait()
        self._coming = self._places = None
        self._here.clear()
        self._waiting.clear()
        self._free.clear()
        self._cache.lent[:] = False

    def _next_round(self, but: Ints) -> list[tuple[list[int], Tensor]]:
        """Whom to copy where."""
        if self._places is None:
            self._places = self._find_places()
        places, self._places = self._places[:ROUND], self._places[ROUND:]
        if not places:
            return []
        guests = self._cache.lend(len(places), but)
        if len(guests) < len(places):  # all are on the card
            self._places = []
        if len(guests):
            starts = [place.data_ptr() for place in places[: len(guests)]]
            self._coming = guests, np.array(starts, dtype=np.int64)
        return list(zip(guests.tolist(), places, strict=False))

    def _find_places(self) -> list[Tensor]:
        """All places for an expert, uint8 [block_bytes] each, on 128-byte lines."""
        places = self._buffers.blocks()
        size = max(_PIECE, self._block_bytes + LINE_BYTES)
        self._free = _free_pieces(self._address.device, size, self.kept_free)
        lent = (region() for region in self.regions)
        for memory in [*self._free, *(region for region in lent if region is not None)]:
            data = memory.view(-1).view(torch.uint8)
            data = data[-data.data_ptr() % LINE_BYTES :]
            count = data.numel() // self._block_bytes
            places += data[: count * self._block_bytes].view(count, self._block_bytes).unbind()
        return places

    def _show(self, but: Ints) -> None:
        assert self._coming is not None
        guests, addresses = self._coming
        # Who got a slot meanwhile, or is about to, stays there; who leaves one goes to the host copy first.
        taken = self._cache.slots >= 0
        taken[but[:, 0], but[:, 1]] = True
        self._cache.lent &= ~taken
        kept = ~taken[guests[:, 0], guests[:, 1]]
        entries = (guests[:, 0] * self._row_len + guests[:, 1])[kept]
        device = self._address.device
        values = torch.from_numpy(addresses[kept]).to(device)
        self._address.index_copy_(0, torch.from_numpy(entries).to(device), values)
        self._here.append(entries)
        self._coming = None


def _free_pieces(device: torch.device, size: int, kept: int) -> list[Tensor]:
    """What the allocator holds free for everyone beyond `kept` bytes, in pieces of `size` bytes, for which it takes no
    more of the card."""
    free = 0
    for segment in torch.cuda.memory_snapshot():
        # Graphs have pools of their own.
        if segment["device"] == (device.index or 0) and tuple(segment["segment_pool_id"]) == (0, 0):
            blocks = segment["blocks"]
            free += sum(block["size"] // size for block in blocks if block["state"] == "inactive")
    held = torch.cuda.memory_reserved(device)
    pieces: list[Tensor] = []
    for _ in range(free - ceil_div(kept, size)):
        try:
            pieces.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            break
        if torch.cuda.memory_reserved(device) > held:  # of another stream's blocks
            pieces.pop()
            break
    return pieces


class _LayerBuffers:
    """Two places for the experts of a layer: one is read while the other is filled."""

    def __init__(self, blocks: ExpertBlocks, arena: PinnedArena | PagedArena, device: torch.device) -> None:
        layout = blocks.layout
        self._layout, self._arena = layout, arena
        self._memory = [aligned_bytes(layout.layer_bytes, str(device)) for _ in range(2)]
        self._stacks = [layout.stacks(memory) for memory in self._memory]
        self._holds: list[int | None] = [None, None]
        self.num_layers = self.num_experts = 0  # copied so far
        self._filled = [torch.cuda.Event() for _ in range(2)]
        # What reads a buffer has been sent, up to the event; else it is not known yet.
        self._sent = [False, False]
        self._read = [torch.cuda.Event() for _ in range(2)]
        self._copies = torch.cuda.Stream(device)

    def stage(self, number: int) -> tuple[PackedTensor, PackedTensor]:
        for wanted in (number, number + 1):
            if wanted not in self._holds and wanted < len(self._layout.layers):
                self._fetch(wanted)
        at = self._holds.index(number)
        self._sent[at] = False
        self._filled[at].wait()
        return self._stacks[at]

    def sent(self, number: int) -> None:
        """All that reads the staged layer has been sent, unless it is staged again."""
        at = self._holds.index(number)
        self._sent[at] = True
        self._read[at].record()

    def blocks(self) -> list[Tensor]:
        """Places for single experts, in both buffers, which hold no layer from now on."""
        self._holds, self._sent = [None, None], [False, False]
        return [block for memory in self._memory for block in memory.view(self._layout.num_experts, -1)]

    def fetch_expert(self, layer: int, expert: int, place: Tensor) -> None:
        """One expert, uint8 [block_bytes], on the current stream."""
        self.num_experts += 1
        self._arena.copy_to(place, (layer * self._layout.num_experts + expert) * self._layout.block_bytes)

    @contextmanager
    def copying(self, done: torch.cuda.Event, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Copies go to their own stream, behind all that was sent, or behind `after`; `done` follows them."""
        if after is None:
            self._copies.wait_stream(torch.cuda.current_stream())
        else:
            self._copies.wait_event(after)
        with torch.cuda.stream(self._copies):
            yield
            done.record()

    def _fetch(self, number: int) -> None:
        """Into the buffer whose layer has been sent all its work before this one's: as soon as that is done, while
        attention of the layer between still computes."""
        at = number % 2
        self._holds[at] = number
        self.num_layers += 1
        with self.copying(self._filled[at], self._read[at] if self._sent[at] else None):
            self._arena.copy_to(self._memory[at], number * self._layout.layer_bytes)


def _addresses(blocks: ExpertBlocks, flag: int = 0) -> Tensor:
    """int64 [L, E], on the CPU: the first byte of each expert in `memory`, with `flag`; then of the shared one, if
    it is in a block too."""
    layout = blocks.layout
    shape = (len(layout.layers), layout.num_experts)
    numbers = torch.arange(shape[0] * shape[1]).view(shape)
    address = blocks.memory.data_ptr() + layout.block_bytes * numbers | flag
    if blocks.shared is None:
        return address
    shared = blocks.shared.data_ptr() + layout.block_bytes * torch.arange(shape[0])
    return torch.cat((address, shared[:, None]), dim=1)


def _table(blocks: ExpertBlocks, address: Tensor, fills: ExpertFills | None = None) -> ExpertTable:
    layout, shared = blocks.layout, blocks.shared is not None
    sizes = layout.hidden, layout.inner
    return ExpertTable(address, layout.gate_up, layout.down, *sizes, fills=fills, shared=shared)
