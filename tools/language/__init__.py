"""A lint for names and prose: one name per thing, and plain English in docstrings, comments, messages and documents."""
