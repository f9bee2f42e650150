"""Create megatron-core's process groups, which determine a rank's share of batches and its pipeline stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from qwen35_trainer.engines.batch_ranks import BatchRanks
from qwen35_trainer.engines.megatron.layout import Layout


@dataclass(frozen=True)
class MegatronRanks(BatchRanks):
    """The number of a rank, its share of batches, and its place in the pipeline."""

    rank: int
    data_shares: int
    share: int
    is_last_stage: bool
    """Whether this rank is in the last pipeline stage, which computes scores and losses."""
    adds: bool

    @property
    def data_share(self) -> int:
        return self.share

    @property
    def adds_to_sums(self) -> bool:
        return self.adds

    @classmethod
    def of(cls, layout: Layout, timeout: timedelta, seed: int) -> MegatronRanks:
        """Create megatron-core's process groups, and seed megatron-core's random states. Collective.

        The default process group must be initialised. timeout: the maximum time of a collective. It is rounded up to
        minutes, the unit of megatron-core.
        """
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
            distributed_timeout_minutes=math.ceil(timeout.total_seconds() / 60),
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(seed)
        last = parallel_state.is_pipeline_last_stage()
        return cls(
            rank=dist.get_rank(),
            data_shares=parallel_state.get_data_parallel_world_size(),
            share=parallel_state.get_data_parallel_rank(),
            is_last_stage=last,
            adds=last and parallel_state.get_tensor_model_parallel_rank() == 0,
        )
