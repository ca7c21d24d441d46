"""Causal depthwise convolution with SiLU, carrying the last inputs from call to call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """silu(conv(x)) of x [T, C] with weight [C, K] fp32, after the inputs in state [C, K - 1].

    state is changed in place to the last K - 1 inputs. One multiply-add a tap in a fixed order, so that a
    row's bits do not depend on where a call starts. Returned in x's dtype.
    """
    taps = weight.shape[1]
    full = torch.cat((state.t().to(x.dtype), x))
    length = x.shape[0]
    out = full[:length].float() * weight[:, 0]
    for tap in range(1, taps):
        out += full[tap : tap + length].float() * weight[:, tap]
    state.copy_(full[length:].t())
    return F.silu(out).to(x.dtype)
