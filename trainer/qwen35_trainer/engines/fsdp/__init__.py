"""Training with PyTorch's fully sharded data parallelism (FSDP2)."""
