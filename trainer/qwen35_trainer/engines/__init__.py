"""Training engines: one contract (`base`), one package per engine."""
