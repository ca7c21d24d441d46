"""The OpenAI-compatible server: one model, one engine thread, an event loop around it."""
