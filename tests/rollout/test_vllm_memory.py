"""The memory of vLLM's caches on the CPU."""

import re
from types import SimpleNamespace

import psutil
import pytest

from qwen35_trainer.rollout.vllm_memory import CacheTooSmall, cpu_cache_bytes

GIB = 2**30


class Config:
    """A model with one layer of each kind. A block has 128 tokens of 1 MiB each, so that its state fits into one block."""

    layer_types = ("linear_attention", "full_attention")
    linear_num_key_heads = linear_num_value_heads = 4
    linear_key_head_dim = linear_value_head_dim = 128
    linear_conv_kernel_dim = 4
    num_key_value_heads, head_dim = 1024, 256

    def get_text_config(self) -> "Config":
        return self


class FullAttention:
    """A model of Qwen3 with three layers, in which a block of 128 tokens has 3 · 128 MiB."""

    num_hidden_layers, num_key_value_heads, head_dim = 3, 1024, 256

    def get_text_config(self) -> "FullAttention":
        return self


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch):
    def provide(size: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=size))

    return provide


def test_more_memory_than_all_sequences_need_is_left_alone(available) -> None:
    available(1000 * GIB)
    # 2 blocks of states and 4 of keys and values for each sequence, and 64 spare ones, of 128 MiB
    assert cpu_cache_bytes(Config(), 8, 512, 0.6) == (8 * 6 + 64) * 128 * 2**20


def test_a_model_without_states_gets_the_blocks_of_its_tokens_and_the_one_that_vllm_gives_to_no_sequence(
    available,
) -> None:
    available(1000 * GIB)
    assert cpu_cache_bytes(FullAttention(), 8, 513, 0.6) == (8 * 5 + 1) * 3 * 128 * 2**20


def test_less_memory_than_all_sequences_need_is_used_up_to_the_share(available) -> None:
    available(20 * GIB)
    assert cpu_cache_bytes(Config(), 100, 512, 0.5) == 10 * GIB


def test_too_little_memory_for_one_sequence_is_refused_with_the_share_that_would_do(available) -> None:
    available(20 * GIB)
    with pytest.raises(CacheTooSmall, match=r"one sequence of 512 tokens needs 8.75 GiB.*20 GiB.*is 8 GiB") as raised:
        cpu_cache_bytes(Config(), 1, 512, 0.4)
    [enough] = re.findall(r"memoryFraction to at least ([\d.]+)", str(raised.value))
    assert cpu_cache_bytes(Config(), 1, 512, float(enough)) == 70 * 128 * 2**20


def test_memory_that_no_share_would_make_enough_is_refused_with_other_ways_out(available) -> None:
    available(5 * GIB)
    with pytest.raises(CacheTooSmall, match=r"Give the pod more memory, or lower data\.maxPromptTokens"):
        cpu_cache_bytes(Config(), 1, 512, 1.0)
