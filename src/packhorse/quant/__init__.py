"""Packed weight formats, KV codecs and importers."""
