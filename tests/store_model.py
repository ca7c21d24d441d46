"""A stand-in for a model: everything it writes to the store is a hash of the tokens up to there.

So whoever reads a page or a state knows from the tokens alone what must be in it.
"""

from functools import lru_cache

import torch

from packhorse.core.types import LayerKind, Span
from packhorse.facts.model import DeltaFacts
from packhorse.quant.codec import PlainCodec
from packhorse.store.kv import KVStore
from packhorse.store.prefix import Entry
from packhorse.store.tier import StoreGeometry

FULL, LINEAR = LayerKind.FULL, LayerKind.LINEAR
DELTA = DeltaFacts(num_k_heads=1, num_v_heads=2, k_head_dim=2, v_head_dim=3, conv_kernel=3)
HEADS, DIM = 2, 2


def geometry(*, hybrid: bool, page_len: int, dtype: torch.dtype = torch.float32) -> StoreGeometry:
    """Two full layers; hybrid: and two linear ones."""
    kinds = (LINEAR, FULL, LINEAR, FULL) if hybrid else (FULL, FULL)
    return StoreGeometry(kinds, PlainCodec(dtype, HEADS, DIM, page_len), DELTA if hybrid else None, dtype)


def make_store(*, hybrid: bool = False, page_len: int = 4, **settings) -> KVStore:
    """A small poisoned store."""
    defaults = {"num_pages": 16, "sequences": 2, "snapshots": 4, "snapshot_len": page_len * 1000}
    return KVStore(geometry(hybrid=hybrid, page_len=page_len), poison=True, **(defaults | settings))


@lru_cache(maxsize=100_000)
def prefix_hash(tokens: tuple[int, ...]) -> int:
    """A number below 2^16 for a token prefix."""
    value = prefix_hash(tokens[:-1]) if tokens else 17
    return (value * 31 + tokens[-1] * 7 + 11) % 65_521 if tokens else value


def expected_kv(
    tokens: tuple[int, ...], start: int, stop: int, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of positions start .. stop, [stop - start, HEADS, DIM], all values different in a token."""
    base = torch.tensor([float(prefix_hash(tokens[: p + 1])) for p in range(start, stop)])
    lanes = torch.arange(HEADS * DIM).view(HEADS, DIM) / 8 + layer
    k = base[:, None, None] + lanes
    return k, -k


def expected_state(tokens: tuple[int, ...], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """conv and recurrent after `tokens`: zero before the first."""
    conv = torch.zeros(DELTA.conv_dim, DELTA.conv_kernel - 1)
    recurrent = torch.zeros(DELTA.num_v_heads, DELTA.k_head_dim, DELTA.v_head_dim)
    if tokens:
        conv += prefix_hash(tokens) + layer + torch.arange(conv.numel()).view(conv.shape) / 64
        recurrent -= prefix_hash(tokens) + layer + torch.arange(recurrent.numel()).view(recurrent.shape) / 64
    return conv, recurrent


def run_step(store: KVStore, parts: list[tuple[object, list[int]]]) -> None:
    """One step: each (sequence, new tokens) is one span. Checks all that the store offers, and writes."""
    spans, row = [], 0
    for sequence, new in parts:
        spans.append(Span(sequence.slot, row, sequence.position, len(new)))
        row += len(new)
    tokens = {s.slot: (*s.token_ids[: s.position], *new) for s, new in parts}
    views = store.views(spans)
    for layer, kind in enumerate(store.geometry.layer_kinds):
        assert list(views[layer].spans) == spans
        for span in spans:
            if kind is FULL:
                views[layer].write(span, *expected_kv(tokens[span.slot], span.position, span.end, layer))
                for stop in {1, span.position + 1, span.end}:
                    check_segments(store, views[layer].segments(span, stop), tokens[span.slot], stop, layer)
            else:
                run_linear_layer(store, views[layer].state(span), tokens[span.slot], span, layer)
    store.complete(spans, {s.slot: new for s, new in parts})


def check_segments(store: KVStore, segments, tokens: tuple[int, ...], stop: int, layer: int) -> None:
    """The segments hold what was written, follow on one another and are cut where they must be."""
    at = 0
    for start, k, v in segments:
        end = start + k.shape[0]
        assert start == at and at < end <= stop
        assert start // store.segment_len == (end - 1) // store.segment_len
        if store.exact:
            assert start % store.segment_len == 0 and (end % store.segment_len == 0 or end == stop)
        expected_k, expected_v = expected_kv(tokens, start, end, layer)
        assert torch.equal(k.float(), expected_k.to(k.dtype).float())
        assert torch.equal(v.float(), expected_v.to(v.dtype).float())
        at = end
    assert at == stop


def run_linear_layer(store: KVStore, state, tokens: tuple[int, ...], span: Span, layer: int) -> None:
    """Check the state before the span, and advance it: by whole pages in exact mode."""
    page_len = store.page_len

    def state_position(position: int) -> int:
        return position // page_len * page_len if store.exact else position

    conv, _ = expected_state(tokens[: span.position], layer)
    _, recurrent = expected_state(tokens[: state_position(span.position)], layer)
    assert torch.equal(state.conv, conv) and torch.equal(state.recurrent, recurrent)
    state.conv.copy_(expected_state(tokens, layer)[0])
    state.recurrent.copy_(expected_state(tokens[: state_position(span.end)], layer)[1])
    assert (state.pending is not None) is store.exact
    if store.exact:
        first = state_position(span.position)
        held = [float(prefix_hash(tokens[: p + 1])) for p in range(first, span.position)]
        assert torch.equal(state.pending[: len(held), -1], torch.tensor(held))
        for position in range(max(state_position(span.end), span.position), span.end):
            state.pending[position % page_len] = float(prefix_hash(tokens[: position + 1]))


def prefill(store: KVStore, sequence, chunk: int = 1000) -> None:
    """Read the rest of the prompt in chunks that end where the store wants a snapshot."""
    while sequence.position < sequence.prompt_len:
        stop = min(sequence.position + chunk, sequence.prompt_len, sequence.next_boundary or 10**9)
        run_step(store, [(sequence, sequence.token_ids[sequence.position : stop])])


def run(store: KVStore, prompt, generated=(), *, marks=(), keep: bool = True) -> int:
    """Open, read, generate and close; returns how many tokens were reused."""
    prompt = list(prompt)
    sequence = store.open(prompt, len(prompt) + len(generated), marks)
    assert sequence is not None
    prefill(store, sequence)
    for token in generated:
        run_step(store, [(sequence, [token])])
    store.close(sequence, keep=keep)
    check(store)
    return sequence.cached_len


def chain_tokens(entry: Entry) -> tuple[int, ...]:
    """All token ids from the root to `entry.stop`."""
    encoded = b""
    while entry.parent is not None:
        encoded = entry.tokens + encoded
        entry = entry.parent
    return tuple(memoryview(encoded).cast("I"))


def all_entries(root: Entry) -> list[Entry]:
    """Entries below `root`, parents first."""
    found = [child for same_page in root.children.values() for child in same_page]
    for entry in found:
        found.extend(child for same_page in entry.children.values() for child in same_page)
    return found


def check(store: KVStore) -> None:
    """Every rule of the store's books, and the content of every page and snapshot that it keeps."""
    tree, pages, slots = store._tree, store._pages, store._slots
    entries = [entry for root in tree._roots.values() for entry in all_entries(root)]
    assert set(entries) == set(tree.entries) and len(set(entries)) == len(entries)
    holders = [0] * pages.num_pages
    for sequence in store._open.values():
        for page in sequence.page_ids:
            holders[page] += 1
    in_tree = [page for entry in entries for page in entry.page_ids]
    assert len(in_tree) == len(set(in_tree)) == tree.num_pages
    for page in in_tree:
        holders[page] += 1
    assert holders == [pages.holders(p) for p in range(pages.num_pages)]
    free = [p for p in range(pages.num_pages) if not holders[p]]
    assert [p for run in pages.free_runs() for p in run] == free and pages.num_free == len(free)
    unpinned = [e for e in entries if not e.pins]
    assert tree.unpinned_pages == sum(len(e.page_ids) for e in unpinned)
    assert all(pages.holders(p) == 1 for e in unpinned for p in e.page_ids)
    check_entries(store, entries)
    snapshots = [e.snapshot for e in entries if e.snapshot is not None]
    rolling = [s.rolling for s in store._open.values() if s.rolling is not None]
    collected = [slot for s in store._open.values() for slot in s.collected.values()]
    snapshots += collected
    taken = [*snapshots, *rolling, *slots._pool]
    assert sorted(taken) == list(range(slots.sequences, slots.num_slots))
    assert (len(snapshots), len(rolling)) == (slots.num_entries, slots.num_rolling)
    assert slots.num_entries <= slots.snapshots
    for layer in store.geometry.full_layers:
        assert bool((store._tier.pages(layer)[free] == 0xFF).all()), "a free page is not poisoned"
    if store.geometry.is_hybrid:
        for slot in [*slots._pool, *slots._active]:
            assert bool((store._tier.state_record(slot) == 0xFF).all()), "a free state is not poisoned"


def check_entries(store: KVStore, entries: list[Entry]) -> None:
    tree, page_len = store._tree, store.page_len
    tips = [s.tip for s in store._open.values()]
    assert all(tip.parent is None or tip.alive for tip in tips)
    for entry in entries:
        assert entry.alive and entry.parent is not None
        assert entry.start == entry.parent.stop
        assert entry.stop - entry.start == len(entry.page_ids) * page_len == len(entry.tokens) // 4 > 0
        assert entry.pins == sum(entry in tree.chain(tip) for tip in tips)
        assert (entry.snapshot is not None) is store.geometry.is_hybrid
        for siblings in entry.parent.children.values():
            for other in siblings:
                assert other is entry or not other.tokens.startswith(entry.tokens)
        tokens = chain_tokens(entry)
        for layer in store.geometry.full_layers:
            k, v = store._bound[layer].read(list(entry.page_ids), 0, entry.stop - entry.start)
            expected_k, expected_v = expected_kv(tokens, entry.start, entry.stop, layer)
            assert torch.equal(k, expected_k) and torch.equal(v, expected_v)
        if entry.snapshot is not None:
            check_snapshot(store, entry.snapshot, tokens)


def check_snapshot(store: KVStore, slot: int, tokens: tuple[int, ...]) -> None:
    """The bytes of a state slot are those of the state after `tokens`."""
    shape = store.geometry
    record = store._tier.state_record(slot)
    for at, layer in enumerate(shape.linear_layers):
        start = at * (shape.conv_bytes + shape.recurrent_bytes)
        conv, recurrent = expected_state(tokens, layer)
        stored = record[start:].view(torch.float32)
        assert torch.equal(stored[: conv.numel()], conv.flatten())
        stored = record[start + shape.conv_bytes :].view(torch.float32)
        assert torch.equal(stored[: recurrent.numel()], recurrent.flatten())


def check_all_free(store: KVStore) -> None:
    """With nothing open, a cleared store is as new."""
    store.clear()
    check(store)
    stats = store.stats
    assert (stats.pages_free, stats.pages_used, stats.pages_cached) == (
        store.capacity // store.page_len,
        0,
        0,
    )
    assert (stats.entries, stats.snapshots, stats.open_sequences) == (0, 0, 0)
    assert store._pages.free_runs() == [range(stats.pages_free)]
