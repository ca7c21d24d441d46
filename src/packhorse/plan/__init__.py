"""Who gets which bytes, and how fast it will be. No torch."""
