"""The model families. Each has an adapter for its layers, which changes instances and never the classes of a library."""
