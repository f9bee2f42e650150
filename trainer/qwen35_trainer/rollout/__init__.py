"""Inference engines that generate sequences: their interface (`rollout_engine`), an engine in torch, and one on vLLM."""
