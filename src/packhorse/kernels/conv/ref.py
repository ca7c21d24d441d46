"""Causal depthwise convolution, carrying the last inputs from call to call."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
    """Convolution of x [T, C] with weight [C, K] fp32, after the inputs in state [C, K - 1]: [T, C] fp32.

    state is changed in place to the last K - 1 inputs. One multiply and one add a tap in a fixed order, so
    that a row's bits do not depend on where a call starts. The caller applies the activation.
    """
    taps, length = weight.shape[1], x.shape[0]
    full = torch.cat((state.t().to(x.dtype), x))
    out = full[:length].float() * weight[:, 0]
    for tap in range(1, taps):
        out += full[tap : tap + length].float() * weight[:, tap]
    state.copy_(full[length:].t())
    return out
