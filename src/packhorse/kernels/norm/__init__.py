"""RMS norms, with fp32 statistics."""
