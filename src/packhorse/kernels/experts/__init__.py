"""Router and routed experts."""
