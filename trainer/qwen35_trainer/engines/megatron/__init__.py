"""Training with megatron-core: tensor, sequence, pipeline and expert parallelism, and its distributed optimizer."""
