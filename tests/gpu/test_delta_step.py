"""Convolution and delta rule of decode steps on a card, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.errors import UnsupportedCardError, UsageError
from packhorse.kernels.cuda.launch import target_of
from packhorse.kernels.delta.cuda import delta_step, variant

pytestmark = pytest.mark.gpu

EPS = 1e-6
# Of the largest wanted value, fp32 throughout: and of outputs, which are rounded to 16 bits.
BOUND = 2e-5
OUT_BOUND = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def close(got: Tensor, want: Tensor, bound: float) -> None:
    assert bool(got.isfinite().all())
    error = float((got.double() - want.double()).abs().max() / want.double().abs().max())
    assert error <= bound, f"relative error {error:.1e} above {bound:.0e}"


class Layer:
    """A delta-net layer's inputs between the projections, and its states in a pool with other bytes around."""

    def __init__(self, num_k: int, num_v: int, dim: int, spans: list[int], dtype: torch.dtype, fp32: bool):
        self.num_k, self.num_v, self.dim, self.spans, self.dtype = num_k, num_v, dim, spans, dtype
        channels = (2 * num_k + num_v) * dim
        num_rows = sum(spans) + 1
        width = channels + num_v * dim
        self.qkvz = randn(num_rows, width, seed=1).to(torch.float32 if fp32 else dtype)
        self.ba = randn(num_rows, 2 * num_v, seed=2).to(self.qkvz.dtype)
        self.weight = 0.5 * randn(channels, 4, seed=3)
        self.gate_params = randn(num_v, seed=4), randn(num_v, seed=5)
        self.norm = 1 + 0.1 * randn(dim, seed=6)
        slots = len(spans) + 2
        self.slots = torch.randperm(slots, generator=torch.Generator().manual_seed(0))[: len(spans)].tolist()
        self.conv = (
            randn(slots, channels * 3 + 40, seed=7).to(dtype)[:, : channels * 3].unflatten(1, (channels, 3))
        )
        self.state = randn(slots, num_v * dim * dim + 64, seed=8)[:, : num_v * dim * dim]
        self.state = self.state.unflatten(1, (num_v, dim, dim))
        self.first = [sum(spans[:i]) for i in range(len(spans))]
        self.where = tuple(
            torch.tensor(x, dtype=torch.int32, device="cuda") for x in (self.first, spans, self.slots)
        )

    def run(self, at_rest: bool = False) -> Tensor:
        out = torch.full(
            (self.qkvz.shape[0], self.num_v, self.dim), torch.nan, dtype=self.dtype, device="cuda"
        )
        weights = (self.weight, *self.gate_params, self.norm)
        turns = torch.zeros(len(self.where[0]), self.num_k, dtype=torch.int32, device="cuda")
        states = self.conv, self.state
        delta_step(self.qkvz, self.ba, weights, EPS, states, self.where, turns, out, at_rest=at_rest)
        assert not turns.any()
        return out

    def want(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Outputs, conv states and recurrent states of each sequence, in float64."""
        a_log, dt_bias = (x.double() for x in self.gate_params)
        outs, convs, states = [], [], []
        for first, tokens, slot in zip(self.first, self.spans, self.slots, strict=True):
            channels = self.weight.shape[0]
            x = self.qkvz[first : first + tokens, :channels].to(self.dtype)
            full = torch.cat((self.conv[slot], x.t()), dim=1)
            convs.append(full[:, tokens:].clone())
            if not tokens:
                states.append(self.state[slot].double())
                continue
            mixed = F.conv1d(full.double()[None], self.weight.double()[:, None], groups=channels)[0].t()
            q, k, v = F.silu(mixed).split([self.num_k * self.dim] * 2 + [self.num_v * self.dim], dim=1)
            q, k = (y.unflatten(1, (self.num_k, self.dim)) for y in (q, k))
            q, k = (y * (y.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
            group = self.num_v // self.num_k
            q, k = q.repeat_interleave(group, dim=1) * self.dim**-0.5, k.repeat_interleave(group, dim=1)
            v = v.unflatten(1, (self.num_v, self.dim))
            b, a = self.ba[first : first + tokens].double().chunk(2, dim=1)
            beta, g = b.sigmoid(), -a_log.exp() * F.softplus(a + dt_bias)
            state, out = self.state[slot].double(), []
            for t in range(tokens):
                state = state * g[t].exp()[:, None, None]
                change = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
                state = state + k[t][:, :, None] * change[:, None, :]
                out.append(torch.einsum("hkv,hk->hv", state, q[t]))
            states.append(state)
            o = torch.stack(out)
            z = self.qkvz[first : first + tokens, channels:].double().unflatten(1, (self.num_v, self.dim))
            outs.append(o * (o.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self.norm.double() * F.silu(z))
        return outs, convs, states


@pytest.mark.parametrize("fp32", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_k", "num_v", "dim"), [(2, 4, 32), (1, 3, 64), (16, 32, 128), (2, 2, 128)])
def test_steps(num_k, num_v, dim, dtype, fp32):
    """One token, several, none and sixteen of four sequences; slots in any order; what lies between stays."""
    layer = Layer(num_k, num_v, dim, [1, 5, 0, 16], dtype, fp32)
    target, wanted = target_of(torch.device("cuda")), variant(dim, 4, dtype)
    if target.arch < wanted.min_arch:
        with pytest.raises(UnsupportedCardError):
            target.check(wanted)
        pytest.skip("bf16 needs compute capability 8.0")
    outs, convs, states = layer.want()
    before = layer.conv.clone(), layer.state.clone()
    got = layer.run(at_rest=fp32)
    close(got[:-1], torch.cat(outs), OUT_BOUND[dtype])
    assert bool(got[-1].isnan().all())
    for slot, conv, state in zip(layer.slots, convs, states, strict=True):
        assert torch.equal(layer.conv[slot], conv)
        close(layer.state[slot], state, BOUND)
    others = [s for s in range(len(layer.conv)) if s not in layer.slots] + [layer.slots[2]]
    assert torch.equal(layer.conv[others], before[0][others]) and torch.equal(
        layer.state[others], before[1][others]
    )


def test_many_tokens_are_single_steps():
    """Sixteen at once and one after another, in a batch and alone: the same bits."""
    many, single = (Layer(2, 4, 128, spans, torch.float16, True) for spans in ([16, 3], [16, 3]))
    want = many.run()
    for t in range(16):
        single.where = tuple(
            torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([t], [1], [single.slots[0]])
        )
        assert torch.equal(single.run()[t], want[t])
    assert torch.equal(single.state[single.slots[0]], many.state[many.slots[0]])
    assert torch.equal(single.conv[single.slots[0]], many.conv[many.slots[0]])


def test_strong_decay_and_large_gates():
    layer = Layer(1, 2, 64, [4], torch.float16, True)
    layer.ba *= 60  # gates from 0 to 1 and decays to 0
    outs, _, states = layer.want()
    close(layer.run()[:-1], torch.cat(outs), OUT_BOUND[torch.float16])
    close(layer.state[layer.slots[0]], states[0], BOUND)


def test_forms_that_are_not_built_are_refused():
    with pytest.raises(UsageError, match="heads of 256 dims"):
        variant(256, 4, torch.float16)
    with pytest.raises(UsageError, match="dims in torch"):
        variant(128, 4, torch.float32)
