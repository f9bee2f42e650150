"""The training engines, which implement one protocol (`train_engine`). Each has a package: `fsdp` and `megatron`."""
