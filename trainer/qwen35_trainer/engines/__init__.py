"""Training engines: one contract (`train_engine`), and one package per engine."""
