"""Tokenizers, chat templates and documents."""
