"""Assumed constants of a plan that neither a manifest nor a data sheet contains, each with its source.

`qwen35 plan --from RUN` uses times measured in an earlier run instead of those computed with these constants.
"""

from __future__ import annotations

from typing import Final

DENSE_UTILISATION: Final = 0.30
"""Share of the peak operations per second that training of a dense model reaches. It was fitted on the rows of Llama
3.1 8B in NeMo RL 0.4 and 0.5 (docs/about/performance-summary.md: 97.7, 92.8, 74.6 and 64.8 s). Pre-training reaches
0.38 to 0.43 (arXiv:2407.21783, table 4)."""
EXPERT_UTILISATION: Final = 0.18
"""Share of the peak operations per second that training of a mixture of experts reaches. It is the mean of pre-training
six such models on H100, 0.243 (NeMo AutoModel, docs/performance-summary.md, 2025-10-02: 216, 250, 189, 277, 279 and 231
of 989 TFLOP/s), times the ratio of reinforcement learning to pre-training for dense models, 0.30 / 0.40."""
PREFILL_UTILISATION: Final = 0.5
"""Share of the peak operations per second that prefill reaches, and a decode step whose matrix products are limited by
computation. An assumption, as in `qwen35 simulate`."""
BANDWIDTH_SHARE: Final = 0.6
"""Share of the memory bandwidth that a decode step reaches: 0.6 on an H100 (Databricks, "LLM Inference Performance
Engineering: Best Practices", 2023, model bandwidth utilisation)."""
STEP_SECONDS: Final = 0.005
"""Seconds of a decode step for scheduling and sampling, during which the device waits. An assumption, for vLLM that does
not schedule ahead: vLLM's blog of 2024-09-05 measures that 62 % of a step of Llama 8B was spent outside the device before
its overhaul. Scheduling ahead, the default on accelerators, overlaps a part of it, which has not been measured here."""
SUM_SECONDS: Final = {"node": 15e-6, "network": 60e-6}
"""Seconds of one all-reduce over the tensor-parallel ranks in a decode step, if the ranks are in one node ("node") or
in several ("network"). Assumptions. Each layer has two all-reduces."""
LINK_SHARE: Final = 0.8
"""Share of a link's bandwidth that large transfers reach. An assumption."""
OBJECT_STORE_RATE: Final = 3e9
"""Bytes per second that a node sends or receives through Ray's object store, which uses TCP and one network interface of the node, not the
devices' RDMA ports. An assumption: 25 Gb/s, of which streams of TCP reach nearly all. A busy machine of two cores reached 0.4e9
(docs/benchmarks.md)."""
STAGING_RATE: Final = 3.5e9
"""Bytes per second that a train rank copies and hashes for a publication, if the transport is not RDMA: measured on a CPU
(docs/benchmarks.md). The link of an accelerator to its host is faster, the hash on one core is not."""
MEAN_LENGTH_SHARE: Final = 0.5
"""Mean response length as a share of the maximum, if `--mean` is not given. An assumption: measure it."""
