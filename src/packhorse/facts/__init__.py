"""What a model and a machine are, read from their files and drivers. No torch."""
