"""Types, errors, units and byte formulas that everything else is written in. No torch."""
