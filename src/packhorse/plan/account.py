"""Bytes of what the engine allocates, as formulas over a model's facts; the engine allocates by them too.

codec: how K and V are stored (`core.formats.kv_token_bytes`). dtype: what is computed in, a compute type.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from packhorse.core import cost, formats
from packhorse.core.units import KIB, MIB, ceil_div, format_bytes, round_up
from packhorse.facts.machine import calibration
from packhorse.facts.model import ModelFacts
from packhorse.facts.packed import packed_matrices
from packhorse.facts.recipes import Recipe, class_bytes
from packhorse.facts.weights import draft_groups, param_groups

FRAME_BYTES = 16 * MIB
"""In what MLP rows move between a card and host memory, where that is modelled."""
SEGMENT_LEN = 8192
"""Keys that attention reads at once at most, as in store.kv."""
DECODE_COPIES = 5
"""fp32 tensors of a segment's K that live at once while K and V are decoded: K, codes, values, two of bytes."""
PROCESS_BYTES = 512 * MIB
"""Memory that is not planned: the interpreter, libraries, allocator slack."""
STAGING_SLOTS, SLOT_BYTES, SLOT_HEADER_BYTES = 28, 4 * MIB, 64 * KIB
"""Pinned slots of both directions between a card and the tiers below it; bytes of pages in one at most, unless one page
is larger; and of its header: as store.staging and store.lower have them."""


def kv_token_bytes(facts: ModelFacts, codec: str) -> int:
    """K and V of one token in all full-attention layers."""
    return facts.num_full_layers * formats.kv_token_bytes(codec, facts.num_kv_heads, facts.head_dim)


def kv_page_bytes(facts: ModelFacts, codec: str, page_len: int) -> int:
    """One page: K and V of `page_len` tokens of one layer."""
    return page_len * formats.kv_token_bytes(codec, facts.num_kv_heads, facts.head_dim)


def kv_bytes(facts: ModelFacts, codec: str, num_tokens: int, page_len: int) -> int:
    """All pages of `num_tokens` tokens, over all layers."""
    return ceil_div(num_tokens, page_len) * facts.num_full_layers * kv_page_bytes(facts, codec, page_len)


def staging_bytes(facts: ModelFacts, codec: str, page_len: int) -> int:
    """Pinned host memory through which pages pass between a card and the tiers below it."""
    page = kv_bytes(facts, codec, page_len, page_len)
    pages = max(1, SLOT_BYTES // page) if page else 1
    return STAGING_SLOTS * round_up(pages * (page + 4 * page_len) + SLOT_HEADER_BYTES, 4 * KIB)


def snapshot_bytes(facts: ModelFacts, dtype: str) -> int:
    """Recurrent state of all linear layers at one position: the convolution's inputs in the compute type, the
    delta rule's state in fp32. 0 for a model without such layers."""
    delta = facts.delta
    if delta is None:
        return 0
    value_bytes = formats.COMPUTE_DTYPES[dtype].block_bytes
    conv = cost.conv_state_bytes(delta.conv_dim, delta.conv_kernel, value_bytes)
    state = cost.recurrent_state_bytes(delta.num_v_heads, delta.k_head_dim, delta.v_head_dim)
    return facts.num_linear_layers * (conv + state)


@lru_cache(maxsize=32)
def weight_bytes(facts: ModelFacts, dtype: str, *, packed: bool = False, cpu: bool = False) -> int:
    """All weights of the text model in the compute type `dtype`; norms, routers, convolutions and decay
    parameters are fp32 always. packed: matrices that the files hold packed stay so. cpu: on a CPU outside exact
    mode, where torch's int4 product has a layout of its own."""
    compute, full = formats.COMPUTE_DTYPES[dtype], formats.COMPUTE_DTYPES["fp32"]
    total = sum(
        (full if group.fp32 else compute).num_bytes(group.num_values) for group in param_groups(facts)
    )
    int4 = cpu and dtype == "bf16"
    kept = packed_matrices(facts) if packed else ()
    return total + sum((m.cpu_bytes if int4 else m.num_bytes) - compute.num_bytes(m.num_values) for m in kept)


@lru_cache(maxsize=32)
def embedding_bytes(facts: ModelFacts, dtype: str, *, packed: bool = False) -> int:
    """The embedding alone, as `weight_bytes` counts it; 0 where it is the output head too."""
    if facts.tied:
        return 0
    kept = [m.num_bytes for m in packed_matrices(facts) if m.kind == "embeddings"] if packed else []
    return kept[0] if kept else formats.COMPUTE_DTYPES[dtype].num_bytes(facts.vocab_size * facts.hidden_size)


@lru_cache(maxsize=32)
def packed_expert_bytes(facts: ModelFacts) -> int:
    """All routed experts as the files hold them packed; 0 where not all of them stay packed, gate and up of all layers
    in one format, down in one."""
    found = [matrix for matrix in packed_matrices(facts) if matrix.kind == "experts"]
    kinds = {(matrix.num_rows, matrix.num_cols, matrix.form.name) for matrix in found}
    # As many as shapes: else matrices of one shape differ in format, and the loader keeps them apart.
    if len({kind[1:] for kind in kinds}) > 2 or len(kinds) > len({kind[:2] for kind in kinds}):
        return 0
    values = sum(group.num_values for group in param_groups(facts) if group.kind == "experts")
    whole = values > 0 and sum(matrix.num_values for matrix in found) == values
    return sum(matrix.num_bytes for matrix in found) if whole else 0


@lru_cache(maxsize=32)
def listed_formats(facts: ModelFacts) -> str:
    """Packed formats of a model's files and the bytes in each, for people."""
    forms: dict[str, int] = {}
    for matrix in packed_matrices(facts):
        forms[matrix.form.name] = forms.get(matrix.form.name, 0) + matrix.num_bytes
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in forms.items())


def recipe_bytes(facts: ModelFacts, recipe: Recipe, *, cpu: bool = False) -> dict[str, int]:
    """All weights of the text model under a recipe, by class. cpu: as for `weight_bytes`."""
    found, compute = class_bytes(param_groups(facts), recipe), formats.COMPUTE_DTYPES[recipe.dtype]
    int4 = cpu and recipe.dtype == "bf16"
    for matrix in packed_matrices(facts) if recipe.from_files else ():
        kept = matrix.cpu_bytes if int4 else matrix.num_bytes
        found[matrix.kind] += kept - compute.num_bytes(matrix.num_values)
    return found


def draft_bytes(facts: ModelFacts, recipe: Recipe) -> int:
    """One layer of multi-token prediction under a recipe."""
    return sum(class_bytes(draft_groups(facts), recipe).values())


def layer_slices(facts: ModelFacts, num_cards: int) -> list[ModelFacts]:
    """The model cut into runs of whole layers, one a card, as even as layers allow."""
    per, rest = divmod(facts.num_layers, num_cards)
    slices, start = [], 0
    for card in range(num_cards):
        stop = start + per + (card < rest)
        kinds, moe = facts.layer_kinds[start:stop], facts.moe_layers[start:stop]
        slices.append(replace(facts, layer_kinds=kinds, moe_layers=moe))
        start = stop
    return slices


def residual_bytes(facts: ModelFacts, num_tokens: int) -> int:
    """fp32 residual stream of the tokens of a sweep."""
    return 4 * facts.hidden_size * num_tokens


def activation_bytes(facts: ModelFacts, num_rows: int) -> int:
    """The widest activations of a layer over `num_rows` tokens, in fp32: a few of them live at once."""
    widths = [2 * facts.intermediate_size, 3 * facts.num_heads * facts.head_dim, 4 * facts.hidden_size]
    if facts.moe is not None:
        widths.append(facts.moe.top_k * (facts.hidden_size + 2 * facts.moe.expert_dim))
    if facts.delta is not None:
        widths.append(4 * facts.delta.conv_dim + 2 * facts.delta.value_dim)
    return 4 * num_rows * 2 * max(widths)


def chunk_bytes(facts: ModelFacts, num_rows: int) -> int:
    """What a layer has at most at once for `num_rows` tokens of a prompt on a card that computes in 16 bits with the
    kernels for it, the residual stream (old and new, fp32) and its norm included."""
    H, D, heads, widest = facts.hidden_size, facts.head_dim, facts.num_heads, []
    # Projections and gate, q three times (normed, turned, grouped), one segment's result, K and V for all heads, fp32.
    widest.append(2 * D * heads * (9 if facts.attn_gate else 8) + 8 * D * facts.num_kv_heads + 2 * H)
    if facts.moe is not None:
        top_k, inner = facts.moe.top_k, facts.moe.expert_dim
        # Of each choice: its row, gate and up, their product, and where it goes; then the sum, the shared expert's too.
        widest.append(top_k * (2 * H + 6 * inner + 40) + 8 * facts.moe.num_experts + 8 * H)
        widest.append(6 * facts.moe.shared_dim + 12 * H)
    if not all(facts.moe_layers):
        widest.append(6 * facts.intermediate_size + 2 * H)
    if facts.delta is not None:
        # q, k, v and z; after the convolution fp32; the rule's result fp32, and normed; gates.
        conv, value = facts.delta.conv_dim, facts.delta.value_dim
        widest.append(6 * conv + 8 * value + 32 * facts.delta.num_v_heads + 2 * H)
    return num_rows * (10 * H + max(widest))


def kv_decode_bytes(facts: ModelFacts, segment_len: int, codec: str | None = None) -> int:
    """What decoding a segment of coded K and V takes where the kernel does not do it itself: bytes as stored, gathered,
    and 16-bit values. codec None: of any, also in fp32."""
    if codec is not None and not formats.KV_FORMATS[codec].rotated:
        values = 2 * segment_len * facts.num_kv_heads * facts.head_dim
        return values * 2 + segment_len * formats.kv_token_bytes(codec, facts.num_kv_heads, facts.head_dim)
    return DECODE_COPIES * 4 * segment_len * facts.num_kv_heads * facts.head_dim


def logits_bytes(facts: ModelFacts, sequences: int) -> int:
    """fp32 logits of a step and what the sampler makes of them."""
    return 3 * 4 * sequences * facts.vocab_size


def delta_transient_bytes(facts: ModelFacts, num_rows: int, chunk_len: int = 64) -> int:
    """What the delta rule's kernels on a card write between their passes over `num_rows` tokens, fp32."""
    delta = facts.delta
    if delta is None:
        return 0
    floats = cost.delta_scratch_floats(delta.k_head_dim, delta.v_head_dim, chunk_len)
    num_rows = min(num_rows, cost.DELTA_SPAN_LEN)
    return 4 * ceil_div(num_rows, chunk_len) * delta.num_v_heads * floats


def split_bytes(facts: ModelFacts, sequences: int) -> int:
    """Partial results of attention over splits of the keys, of a decode step on a card."""
    return 4 * sequences * cost.attention_split_floats(facts.num_heads, facts.head_dim)


def pending_bytes(facts: ModelFacts, sequences: int, page_len: int) -> int:
    """Exact mode's delta-rule inputs since the last page boundary."""
    delta = facts.delta
    if delta is None:
        return 0
    values = delta.conv_dim + 2 * delta.num_v_heads
    return 4 * sequences * facts.num_linear_layers * page_len * values


def runtime_bytes() -> int:
    """What a card holds beside our pools: CUDA context, kernels, slack of the allocator."""
    sizes = calibration()["device_mib"]
    return MIB * int(sizes["context"] + sizes["modules"] + sizes["allocator"])


def graph_bytes(sequences: int) -> int:
    """Pools of the captured decode steps: one for each power of two up to `sequences`."""
    return (
        MIB * int(calibration()["device_mib"]["graphs_per_bucket"]) * (max(1, sequences - 1).bit_length() + 1)
    )


def document_bytes(
    facts: ModelFacts, codec: str, dtype: str, num_tokens: int, page_len: int, snapshot_len: int
) -> int:
    """A document kept for reuse: its pages, a snapshot at each grid point and one at its end."""
    snapshots = num_tokens // snapshot_len + 1
    pages = kv_bytes(facts, codec, num_tokens, page_len)
    return pages + snapshots * snapshot_bytes(facts, dtype)
