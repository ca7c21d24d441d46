"""Optimizer: orthogonalised momentum (Muon) for matrices, Adam for the rest.

Matrices of one shape are stacked, so that a step is a few batched products.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

NOT_MATRICES = ("embed_tokens", "conv1d", "in_proj_a", "in_proj_b", "shared_expert_gate")


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Nearest orthogonal matrices of x [*, m, n], about, by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.bfloat16()
    turned = x.shape[-2] > x.shape[-1]
    x = x.mT if turned else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if turned else x


class Optimizer:
    """Muon and Adam with rates that `step` gets. Its momentum is not saved: a resumed run warms up again."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        others = []
        for name, p in named:
            if p.ndim >= 2 and not any(n in name for n in NOT_MATRICES):
                self.groups.setdefault(tuple(p.shape), []).append(p)
            else:
                others.append(p)
        self.momentum = {s: torch.zeros(len(ps), *s, device=ps[0].device) for s, ps in self.groups.items()}
        self.adam = torch.optim.Adam(others, lr=0.0, betas=(0.9, 0.98), eps=1e-9, foreach=True)
        self.others = others

    @torch.no_grad()
    def step(self, matrix_rate: float, other_rate: float, momentum: float = 0.95) -> None:
        """Move all parameters by their gradients and drop those."""
        for shape, ps in self.groups.items():
            grad = torch.stack([p.grad for p in ps])  # type: ignore[misc]
            kept = self.momentum[shape]
            kept.lerp_(grad, 1 - momentum)
            change = orthogonal(grad.lerp(kept, momentum)).float()
            scale = matrix_rate * max(1.0, shape[-2] / shape[-1]) ** 0.5
            torch._foreach_add_(ps, list(change.unbind()), alpha=-scale)
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = other_rate
        self.adam.step()
        for ps in self.groups.values():
            for p in ps:
                p.grad = None
        self.adam.zero_grad(set_to_none=True)
