"""The attention of layers without Transformer Engine, against that of megatron-core."""

from collections.abc import Callable

import pytest
import torch

from tests.distributed.group import Group

pytestmark = pytest.mark.torch


def test_attention_is_megatron_core_s_and_holds_no_scores(groups: Callable[[int], Group]) -> None:
    [result] = groups(1).run("attention", positions=256, sequences=2)
    for ours, theirs in zip(result["ours"], result["theirs"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert result["bytes of ours"] < result["scores"] / 2
    assert result["bytes of theirs"] > 2 * result["scores"]


def test_no_position_sees_the_padding_to_its_right(groups: Callable[[int], Group]) -> None:
    [result] = groups(1).run("attention", positions=9, sequences=2)
    assert result["other padding of ours"][:-1].equal(result["ours"][0][:-1])
    assert not result["other padding of ours"][-1].allclose(result["ours"][0][-1])
