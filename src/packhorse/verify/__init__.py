"""Parity, recall and soak proofs (not built yet)."""
