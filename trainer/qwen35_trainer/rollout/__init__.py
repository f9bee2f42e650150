"""Inference engines that generate sequences: one contract (`rollout_engine`), and an engine each for torch and for vLLM."""
