"""The model families. A family adapts individual models of transformers, and never changes the library's classes."""
