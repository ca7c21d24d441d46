"""One folder an operation: ref.py is the truth in torch; faster twins stand beside it."""
