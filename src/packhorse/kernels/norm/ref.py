"""RMS norms: statistics and factors in fp32 whatever the input's type."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x [..., D] / rms(x) * weight [D] (fp32; an offset of 1 is folded in at load), cast to `dtype`."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Norm first, then the gate: rms_norm(x) * silu(gate), shapes [..., D]."""
    return (rms_norm(x, weight, eps, torch.float32) * F.silu(gate.float())).to(dtype)


def sigmoid_gate(x: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """x * sigmoid(gate), shapes [..., D], cast to `dtype`."""
    return (x * torch.sigmoid(gate.float())).to(dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dim, fp32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)
