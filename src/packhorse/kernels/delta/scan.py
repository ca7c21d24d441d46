"""The gated delta rule of many chunks with little left to do one after another.

Everything that does not depend on the state is computed for all chunks at once; the walk over the chunks is
three small products each. Same letters as `ref`; N chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from packhorse.core.units import ceil_div
from packhorse.kernels.delta.ref import CHUNK_LEN


def delta_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Shapes and meaning of `ref.delta_steps`: q, k [T, Hv, Dk], v [T, Hv, Dv], g, beta [T, Hv], all fp32;
    state [Hv, Dk, Dv] in place. Returns o [T, Hv, Dv].

    With the chunk's decays folded in, the updates are u = U - W S for U, W solved before the walk; the state
    before each chunk is kept, N * Hv * Dk * Dv values, for the outputs that are computed after it.
    """
    length = q.shape[0]
    q, k, v, g, beta = (_chunked(x) for x in (q, k, v, g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK_LEN, CHUNK_LEN, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    seen = total.exp()[..., None]
    key = k * beta[..., None]
    system = (key @ k.transpose(-1, -2) * decay).tril(-1)
    right = torch.cat((v * beta[..., None], key * seen), dim=-1)
    eye = torch.eye(CHUNK_LEN, device=q.device)
    solved = torch.linalg.solve_triangular(system + eye, right, upper=False, unitriangular=True)
    value, weight = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    left = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    keep = seen[..., -1:, :]

    before = torch.empty(q.shape[0], *state.shape, device=q.device)
    update = torch.empty_like(value)
    for n in range(q.shape[0]):
        before[n] = state
        torch.baddbmm(value[n], weight[n], state, alpha=-1, out=update[n])
        state.mul_(keep[n])
        state.baddbmm_(left[n], update[n])
    out = (q * seen) @ before + (q @ k.transpose(-1, -2) * decay) @ update
    return out.transpose(1, 2).flatten(0, 1)[:length]


def _chunked(x: Tensor) -> Tensor:
    """[T, Hv, ...] -> [N, Hv, CHUNK_LEN, ...], filled up with zeros, which change nothing."""
    padding = ceil_div(x.shape[0], CHUNK_LEN) * CHUNK_LEN - x.shape[0]
    x = F.pad(x, [0, 0] * (x.dim() - 1) + [0, padding])
    return x.unflatten(0, (-1, CHUNK_LEN)).transpose(1, 2).contiguous()
