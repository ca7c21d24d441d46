"""Router's choice and routed experts through a table of addresses, against float64."""

import dataclasses
import random

import pytest
import torch

from matrix_cases import bound, error, random_packed, to_device
from packhorse.core.formats import PACKED
from packhorse.kernels import dispatch
from packhorse.kernels.cuda import launch
from packhorse.kernels.experts.cuda import (
    ExpertFills,
    ExpertTable,
    apply_changes,
    expert_mix,
    new_counters,
    plan_routes,
    route,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(256, 8), (512, 10), (4, 2), (100, 1), (8, 8)])
def test_route(num_experts, top_k, norm):
    """The best of the softmax in order, with their weights, and a plan that sorts their routes by expert."""
    for num in (1, 3, 16):
        logits = torch.randn(num, num_experts, generator=torch.Generator().manual_seed(num)) * 3
        logits[0, : num_experts // 2] = logits[0, 0]  # equal ones: the lower first
        weights = logits.double().softmax(-1)
        want = torch.sort(weights, dim=-1, descending=True, stable=True)
        share = want.values[:, :top_k]
        share = share / share.sum(-1, keepdim=True) if norm else share
        counters = new_counters("cuda")
        table = table_of(num_experts)
        got = route(logits.cuda(), top_k, norm, table, 1, counters)
        assert got.experts.tolist() == want.indices[:, :top_k].tolist()
        assert error(got.weights.cpu(), share) < 2e-6
        check_plan(got, counters)
        again = plan_routes(got.weights, got.experts.long(), table, 1, counters)
        check_plan(again, counters // 2)


@pytest.mark.parametrize(("num_experts", "top_k"), [(256, 8), (33, 3), (511, 9)])
def test_route_with_a_shared_expert(num_experts, top_k):
    """Every token goes to the last expert too, with the sigmoid of its own logit; the others are chosen as without."""
    table = dataclasses.replace(table_of(num_experts + 1), shared=True)
    for num in (1, 5, 16):
        logits = torch.randn(num, num_experts + 1, generator=torch.Generator().manual_seed(num)).cuda() * 3
        logits[:, -1] = torch.linspace(-30, 30, num + 1)[1:]
        counters = new_counters("cuda")
        got = route(logits, top_k, True, table, 1, counters)
        plain = route(
            logits[:, :-1].contiguous(), top_k, True, table_of(num_experts), 1, new_counters("cuda")
        )
        assert torch.equal(got.experts[:, :-1], plain.experts) and torch.equal(
            got.weights[:, :-1], plain.weights
        )
        assert (got.experts[:, -1] == num_experts).all()
        assert error(got.weights[:, -1].cpu(), logits[:, -1].double().sigmoid().cpu()) < 2e-6
        check_plan(got, counters)


def table_of(num):
    address = 1000 + 7 * torch.arange(num, device="cuda")
    form = PACKED["int4-g128"]
    return ExpertTable(torch.stack((0 * address, address)), form, form, 128, 64)


def check_plan(routes, counters):
    """What plan.cuh says."""
    slots, plan = routes.plan[:640].view(160, 4).tolist(), routes.plan[640:992].tolist()
    ids, top_k = routes.experts.flatten().tolist(), routes.experts.shape[1]
    hit = sorted(set(ids))
    assert plan[0] == len(hit) == int(counters[0])
    order = sorted(range(len(ids)), key=lambda r: (ids[r], r))
    want = [[1000 + 7 * e, 0, ids.count(e) << 16 | sum(i < e for i in ids), e] for e in hit]
    assert slots[: len(hit)] == want
    assert plan[32 : 32 + len(ids)] == [r // top_k for r in order]
    assert [order[p] for p in plan[192 : 192 + len(ids)]] == list(range(len(ids)))


class Experts:
    """Experts of one layer, each in memory of its own: every second one in pinned host memory."""

    def __init__(self, gate_up, down, hidden, inner, num):
        self.gate_up = random_packed(gate_up, 2 * inner, hidden, seed=1, lead=(num,))
        self.down = random_packed(down, hidden, inner, seed=2, lead=(num,))
        whole = torch.cat((self.gate_up.data.flatten(1), self.down.data.flatten(1)), dim=1)
        self.places = [one.pin_memory() if i % 2 else one.cuda() for i, one in enumerate(whole)]
        address = torch.tensor([[0] * num, [place.data_ptr() for place in self.places]])
        self.table = ExpertTable(address.cuda(), PACKED[gate_up], PACKED[down], hidden, inner)
        assert self.table.expert_bytes == whole.shape[1]

    def want(self, x, weights, ids):
        """Inner values are rounded to x's dtype, as the kernel must."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        up_values, down_values = self.gate_up.dequantize().double(), self.down.dequantize().double()
        for t in range(x.shape[0]):
            for weight, e in zip(weights[t].double(), ids[t].tolist(), strict=True):
                gate, up = (up_values[e] @ x[t].cpu().double()).chunk(2)
                inner = (gate / (1 + (-gate).exp()) * up).to(x.dtype).double()
                out[t] += weight.cpu() * (down_values[e] @ inner)
        return out


CASES = [
    # gate_up, down, hidden, inner, experts, top_k
    ("int4-g128", "int4-g128", 256, 128, 32, 8),
    ("int4-g128", "int5-g32", 2048, 512, 12, 8),
    ("q4_k", "q6_k", 512, 256, 16, 10),
    ("int8-g32", "fp8-g128", 192, 64, 8, 2),
    ("int4z-g64", "int6m-g16", 320, 704, 5, 3),
    ("int4m-g32", "int8-g128", 128, 192, 40, 10),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_mix(case, dtype):
    """Within the bound of float64; each hit expert's bytes read once; a token's bits do not depend on the others."""
    if dtype == torch.bfloat16 and not launch.target_of(0).has_bf16:
        pytest.skip("no bf16 on this card")
    gate_up, down, hidden, inner, num_experts, top_k = case
    experts = Experts(*case[:5])
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(16, hidden, generator=generator).to("cuda", dtype)
    logits = torch.randn(16, num_experts, generator=generator).cuda()
    logits[:, 0] += 4  # an expert that most tokens want
    residual = torch.randn(16, hidden, generator=generator).cuda()
    whole = None
    for num in (16, 1, 2, 7, 9):
        counters = new_counters("cuda")
        routes = route(logits[:num], top_k, True, experts.table, 1, counters)
        inner_values = torch.full((num * top_k, inner), torch.nan, dtype=dtype, device="cuda")
        out = torch.full((num, hidden), torch.nan, device="cuda")
        got = expert_mix(x[:num], routes, experts.table, counters, inner=inner_values, out=out)
        distinct = len(routes.experts.unique())
        assert counters.tolist() == [distinct, distinct * experts.table.expert_bytes, 0, 0, 0]
        if whole is None:
            whole = got.clone()
            want = experts.want(x, routes.weights, routes.experts)
            rounded = bound(PACKED[gate_up], dtype) + bound(PACKED[down], dtype)
            assert error(got.cpu(), want) <= 2 * rounded + torch.finfo(dtype).eps
        assert torch.equal(got, whole[:num])
        added = expert_mix(x[:num], routes, experts.table, counters, residual=residual[:num])
        assert error(added, got + residual[:num]) < 1e-6
    single = route(logits[5:6], top_k, True, experts.table, 1, new_counters("cuda"))
    assert torch.equal(expert_mix(x[5:6], single, experts.table, new_counters("cuda"))[0], whole[5])


@pytest.mark.parametrize("num", [1, 16])
def test_stacks_through_dispatch(num):
    """A layer's matrices as the loader lays them: the bits of the same experts as blocks."""
    experts = Experts("int4-g128", "int6-g32", 256, 128, 12)
    x = torch.randn(num, 256, generator=torch.Generator().manual_seed(num)).to("cuda", torch.float16)
    routes = route(torch.randn(num, 12).cuda(), 3, True, experts.table, 1, new_counters("cuda"))
    want = expert_mix(x, routes, experts.table, new_counters("cuda"))
    stacks = to_device(experts.gate_up), to_device(experts.down)
    assert torch.equal(
        dispatch.expert_mix(x, routes.weights, routes.experts.long(), *stacks, exact=False), want
    )


def test_inner_values_beyond_fp16():
    """A factor keeps them within the type; without it they become its largest and are counted."""
    experts = Experts("int4-g128", "int4-g128", 256, 128, 4)
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).to("cuda", torch.float16) * 3000
    counters = new_counters("cuda")
    routes = plan_routes(
        torch.ones(2, 2).cuda(), torch.tensor([[0, 1], [3, 1]]).cuda(), experts.table, 1, counters
    )
    assert torch.isfinite(expert_mix(x, routes, experts.table, counters)).all()
    clipped = int(counters[2])
    assert clipped > 0
    got = expert_mix(x, routes, experts.table, counters, factor=2.0**-10)
    assert int(counters[2]) == clipped
    want = experts.want((x.double() / 1024).float(), routes.weights, routes.experts)
    assert want.isfinite().all() and got.abs().max() > 65504


def test_rows_of_nobody():
    """Their experts are not read, whatever their logits hold; their mix is the residual."""
    experts = Experts("int4-g128", "int4-g128", 256, 128, 32)
    x, residual = torch.randn(4, 256).to("cuda", torch.float16), torch.randn(4, 256).cuda()
    x[1] = torch.nan
    logits, live = torch.randn(4, 32).cuda(), torch.tensor([0, -1, 2, -1], dtype=torch.int32, device="cuda")
    logits[1] = torch.nan
    counters = new_counters("cuda")
    routes = route(logits, 3, True, experts.table, 1, counters, live)
    got = expert_mix(x, routes, experts.table, counters, residual=residual)
    distinct = len(routes.experts[::2].unique())
    assert counters[:2].tolist() == [distinct, distinct * experts.table.expert_bytes]
    alone = route(logits[::2], 3, True, experts.table, 1, counters)
    want = expert_mix(
        x[::2].contiguous(), alone, experts.table, counters, residual=residual[::2].contiguous()
    )
    assert torch.equal(got[::2], want) and torch.equal(got[1::2], residual[1::2])
    nobody = route(logits, 3, True, experts.table, 1, counters, torch.full_like(live, -1))
    assert torch.equal(expert_mix(x, nobody, experts.table, counters), torch.zeros_like(residual))


class Residency:
    """A host that moves experts at random: those of layer 1 of a table over slots that are NaN while nobody's."""

    def __init__(self, experts, num_slots, num_spares, share, seed):
        table, self.random = experts.table, random.Random(seed)
        self.home = [place.cpu().pin_memory() for place in experts.places]
        home = torch.tensor([[0] * len(self.home), [place.data_ptr() | 1 for place in self.home]]).cuda()
        self.slots = torch.full((num_slots, table.expert_bytes), 255, dtype=torch.uint8, device="cuda")
        self.table = dataclasses.replace(
            table,
            address=home.clone(),
            fills=ExpertFills.empty(home, num_spares, len(self.home) + num_spares),
        )
        self.free = set(range(num_slots))
        self.slot_of = {}
        self.places = [None] * num_spares  # [slot, expert kept there or None]
        for e in range(round(share * len(self.home))):
            slot = self.slot_of[e] = self.free.pop()
            self.slots[slot] = self.home[e].cuda()
            self.table.address[1, e] = self.slots[slot].data_ptr()

    def change(self):
        """Some experts leave, their slots are poisoned, places get what slots there are; all in one call."""
        fills, num_experts = self.table.fills, len(self.home)
        out = [e for e in self.slot_of if self.random.random() < 0.3]
        for e in out:
            self.slots[self.slot_of[e]] = 255
            self.free.add(self.slot_of.pop(e))
        taken = [s for s, place in enumerate(self.places) if place is None or place[1] is not None]
        taken.sort(key=lambda s: self.places[s] is None or self.places[s][1] not in out)
        rows = [(num_experts + e, -1, 0) for e in out]
        for s in taken[: len(self.free)]:
            slot = self.free.pop()
            self.places[s] = [slot, None]
            rows.append((-1, len(self.places) + s, self.slots[slot].data_ptr()))
        if rows:
            fills.changes[: len(rows)] = torch.tensor(rows).cuda()
        apply_changes(self.table)
        assert (fills.changes[:, :2] == -1).all()

    def check(self, used, host_bytes, kept_bytes):
        """What a step with the distinct experts `used` did. In order: first misses are kept first."""
        fills, size = self.table.fills, self.table.expert_bytes
        missed = [e for e in used if e not in self.slot_of]
        free = [s for s, place in enumerate(self.places) if place is not None and place[1] is None]
        assert fills.used[1].tolist() == used + [-1] * (160 - len(used))
        assert [host_bytes, kept_bytes] == [len(missed) * size, min(len(missed), len(free)) * size]
        for s, e in zip(free, missed, strict=False):
            self.places[s][1] = e
            self.slot_of[e] = self.places[s][0]
        assert fills.filled[1].tolist() == [
            -2 if place is None else -1 if place[1] is None else place[1] for place in self.places
        ]
        for e, slot in self.slot_of.items():
            assert torch.equal(self.slots[slot].cpu(), self.home[e]), e


@pytest.mark.parametrize("share", [0, 0.37, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_fills(case, share):
    """Experts that come and go at random, kept as they are read: the bits of all of them resident."""
    num_experts, top_k = case[4:]
    experts = Experts(*case[:5])
    host = Residency(experts, num_experts + 2 if share == 1 else num_experts // 2 + 3, 3, share, seed=top_k)
    generator = torch.Generator().manual_seed(9)
    for step in range(24):
        if share < 1:
            host.change()
        num = (1, 3, 16)[step % 3]
        x = torch.randn(num, case[2], generator=generator).to("cuda", torch.float16)
        logits = torch.randn(num, num_experts, generator=generator).cuda()
        counters = new_counters("cuda")
        routes = route(logits, top_k, True, host.table, 1, counters)
        got = expert_mix(x, routes, host.table, counters)
        want = expert_mix(
            x, route(logits, top_k, True, experts.table, 1, new_counters("cuda")), experts.table, counters * 0
        )
        assert torch.equal(got, want)
        used = routes.experts.unique().tolist()
        assert counters[:3].tolist() == [len(used), len(used) * host.table.expert_bytes, 0]
        host.check(used, *counters[3:].tolist())


def test_captured_in_a_graph():
    """Routes are found anew at each replay; a table entry may change between replays."""
    experts = Experts("int4-g128", "int4-g128", 256, 128, 32)
    x, counters = torch.randn(3, 256).to("cuda", torch.float16), new_counters("cuda")
    logits = torch.randn(3, 32).cuda()
    launch.prepare([], 0)

    def step():
        return expert_mix(x, route(logits, 8, True, experts.table, 1, counters), experts.table, counters)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    logits.copy_(torch.randn(3, 32))
    moved = experts.places[int(logits[0].argmax())].cuda().clone()
    graph.replay()
    want = step()
    assert torch.equal(out, want)
    experts.table.address[1, int(logits[0].argmax())] = moved.data_ptr()
    graph.replay()
    assert torch.equal(out, want)
