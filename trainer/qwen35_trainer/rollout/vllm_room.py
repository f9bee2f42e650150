"""The number of tokens that the free blocks of vLLM's caches hold."""

from __future__ import annotations

from typing import Any


class CacheRoom:
    """Measures the free memory of an engine core, in tokens of sequences of the maximum length.

    All layers take blocks from one pool. A layer with attention takes one block for every `block_size` tokens, and a
    layer with a state takes a fixed number of blocks for each sequence. The measure is therefore exact for sequences of
    `max_length` tokens. For shorter sequences, the free memory holds fewer tokens than the measure says.

    core: vLLM's LLMEngine, whose scheduler runs in this process.
    """

    def __init__(self, core: Any, max_length: int) -> None:  # noqa: ANN401  # vLLM's, untyped
        scheduler = core.engine_core.engine_core.scheduler
        groups = scheduler.kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        self._pool = scheduler.kv_cache_manager.block_pool
        self._max_length = max_length
        self._blocks: int = sum(
            -(-spec.max_memory_usage_bytes(core.vllm_config) // spec.page_size_bytes) for spec in specs
        )
        """Number of blocks that a sequence of `max_length` tokens takes."""

    @property
    def tokens(self) -> int:
        """Number of tokens for which blocks are free."""
        free: int = self._pool.get_num_free_blocks()
        return free * self._max_length // max(1, self._blocks)
