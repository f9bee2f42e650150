"""Numbers that neither a manifest nor a data sheet contains, each with its source. Measure them where you can: `--from RUN`."""

from __future__ import annotations

from typing import Final

DENSE_UTILISATION: Final = 0.30
"""Share of the peak operations that training of a dense model reaches. Fitted on the rows of Llama 3.1 8B in NeMo RL 0.4 and 0.5
(docs/about/performance-summary.md: 97.7, 92.8, 74.6 and 64.8 s). Pre-training reaches 0.38 to 0.43 (arXiv:2407.21783, table 4)."""
EXPERT_UTILISATION: Final = 0.18
"""The same with experts: pre-training of six mixtures of experts on H100 reaches 0.243 in the mean (NeMo AutoModel,
docs/performance-summary.md, 2025-10-02: 216, 250, 189, 277, 279 and 231 of 989 TFLOP/s), times the ratio of reinforcement learning to
pre-training of dense models, 0.30 / 0.40."""
PREFILL_UTILISATION: Final = 0.5
"""Share of the peak operations of a prefill and of the products of large decode steps. An assumption, as in `qwen35 simulate`."""
BANDWIDTH_SHARE: Final = 0.6
"""Share of the memory's bandwidth that a decode step reaches: 0.6 of an H100's (Databricks, "LLM Inference Performance Engineering: Best
Practices", 2023, model bandwidth utilisation)."""
STEP_SECONDS: Final = 0.005
"""Time of a decode step in addition to the device's work: scheduling and sampling, which vLLM without asynchronous scheduling does not
overlap. An assumption; vLLM's blog of 2024-09-05 measures 62 % of a step of Llama 8B outside the device before its overhaul."""
SUM_SECONDS: Final = {"node": 15e-6, "network": 60e-6}
"""Latency of a sum over tensor-parallel ranks of a decode step, within a node and across nodes. Assumptions; two sums for each layer."""
LINK_SHARE: Final = 0.8
"""Share of a link's bandwidth that large transfers reach. An assumption."""
MEAN_LENGTH_SHARE: Final = 0.5
"""Mean response length as a share of the maximum, if `--mean` is not given. An assumption: measure it."""
