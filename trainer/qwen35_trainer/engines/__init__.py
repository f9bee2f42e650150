"""Training engines. All implement one protocol (`train_engine`); each has a package (`fsdp`, `megatron`)."""
