"""The model families. Each has an adapter for its layers, which changes instances and never classes of a library."""
