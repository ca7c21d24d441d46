"""One file a family, the registry, and the strict streaming loader."""
