"""Gated delta rule (Gated DeltaNet, arXiv 2412.06464), fp32 throughout.

Per value head with state S [Dk, Dv]: S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q.

Letters: T tokens, Hv value heads, Dk, Dv head dims, L chunk length. q and k are normalised and q scaled by
the caller; key heads are already repeated to value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_LEN = 64
STEPWISE_MAX = 8
"""Up to this many tokens the rule runs step by step; more go in chunks."""


def delta_steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Token by token: q, k [T, Hv, Dk], v [T, Hv, Dv], g, beta [T, Hv]; state [Hv, Dk, Dv] in place.

    Returns o [T, Hv, Dv].
    """
    out = torch.empty_like(v)
    decay = g.exp()
    for t in range(q.shape[0]):
        state *= decay[t, :, None, None]
        read = torch.matmul(k[t, :, None, :], state)[:, 0]
        change = (v[t] - read) * beta[t, :, None]
        state += k[t, :, :, None] * change[:, None, :]
        out[t] = torch.matmul(q[t, :, None, :], state)[:, 0]
    return out


def delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk in matrix form: q, k [Hv, L, Dk], v [Hv, L, Dv], g, beta [Hv, L]; state [Hv, Dk, Dv].

    Returns o [Hv, L, Dv] and the state after the chunk; changes nothing. Rows beyond the last real token may
    be zeros: they add exact zeros. Within the chunk the updates u solve (I + A) u = beta (v - decayed S^T k)
    with A strictly lower triangular.
    """
    length = q.shape[1]
    total = g.cumsum(-1)
    lower = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    # exp only where i >= j: above the diagonal the difference is positive and may overflow.
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(~lower, float("-inf")).exp()
    seen = total.exp()[..., None]
    overlap = (k * beta[..., None]) @ k.transpose(1, 2) * decay
    system = overlap.tril(-1)
    right = beta[..., None] * (v - seen * (k @ state))
    update = torch.linalg.solve_triangular(
        system + torch.eye(length, device=q.device), right, upper=False, unitriangular=True
    )
    out = (q * seen) @ state + (q @ k.transpose(1, 2) * decay) @ update
    left = (total[:, -1:] - total).exp()[..., None]
    new = state * seen[:, -1:] + (k * left).transpose(1, 2) @ update
    return out, new


def delta_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Shapes of delta_steps, computed in chunks of CHUNK_LEN; state in place."""
    outs = []
    q, k, v, g, beta = (x.transpose(0, 1).contiguous() for x in (q, k, v, g, beta))
    for start in range(0, q.shape[1], CHUNK_LEN):
        cut = slice(start, start + CHUNK_LEN)
        out, new = delta_chunk(q[:, cut], k[:, cut], v[:, cut], g[:, cut], beta[:, cut], state)
        state.copy_(new)
        outs.append(out)
    return torch.cat(outs, dim=1).transpose(0, 1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Shapes of delta_steps: steps for a few tokens, chunks for more; state in place."""
    rule = delta_steps if q.shape[0] <= STEPWISE_MAX else delta_chunks
    return rule(q, k, v, g, beta, state)
