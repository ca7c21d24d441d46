"""Causal depthwise convolution with carried state."""
