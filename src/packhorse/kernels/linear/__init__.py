"""Dense product."""
