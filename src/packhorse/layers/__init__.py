"""Thin modules over kernels: linear, attention, delta net, experts, norm, rope, embedding."""
