"""Scheduling, the layer loop, sampling: requests in, events out."""
