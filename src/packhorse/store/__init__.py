"""KV pages, recurrent state, snapshots and prefixes: who owns which bytes in which tier."""
