"""Partial rotary embedding and its frequencies."""
