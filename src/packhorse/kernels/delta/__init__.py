"""Gated delta rule, in chunks and step by step."""
