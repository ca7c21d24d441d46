"""Benchmarks and the machine check (offline benchmark of the spine only)."""
