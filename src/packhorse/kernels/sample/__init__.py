"""Drawing the next tokens."""
