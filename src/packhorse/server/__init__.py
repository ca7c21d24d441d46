"""OpenAI-compatible server (not built yet)."""
