"""Model families. Each has one adapter for its layers, which changes instances and never the classes of a library."""
