"""The largest micro-batch of a manifest."""

import pytest

from qwen35_trainer.manifest import parse_spec
from qwen35_trainer.planning.micro_batch_size import MicroBatchSize
from tests.manifest.conftest import SMALL


def size_of(group: int, batch: dict[str, object]) -> MicroBatchSize:
    """Of prompts of 100 tokens and responses of 50, on one of two devices."""
    changes = {
        "data": SMALL["spec"]["data"] | {"maxPromptTokens": 100, "maxResponseTokens": 50},
        "algorithm": {"groupSize": group},
        "train": {"batch": {"promptsPerUpdate": 16, "removePadding": True} | batch},
    }
    spec, problems = parse_spec(SMALL["spec"] | changes)
    assert spec is not None, problems
    return MicroBatchSize.of(spec)


@pytest.mark.parametrize(("sequences", "copies"), [(2, 1), (4, 3), (8, 6)])
def test_a_shared_prompt_counts_once_for_the_samples_of_its_group(sequences, copies) -> None:
    batch = {"microBatchSequences": sequences}
    own, shared = (size_of(4, batch | {"sharePrompts": share}) for share in (False, True))
    assert shared.tokens == own.tokens - 100 * copies == 149 * sequences - 100 * copies
    assert (shared.scored, shared.count, shared.length) == (own.scored, own.count, own.length)
    assert (own.pictured, shared.pictured) == (100 * sequences, 100 * (sequences - copies))


def test_a_micro_batch_may_have_parts_of_two_groups_that_it_does_not_divide() -> None:
    """Groups of 5 are cut into parts of 3 and 2 for micro-batches of 4, and then two parts of 2 are joined."""
    shared = size_of(5, {"microBatchSequences": 4, "sharePrompts": True})
    assert (shared.pictured, shared.tokens) == (200, 149 * 4 - 200)


def test_a_token_budget_has_more_scored_tokens_if_prompts_are_shared() -> None:
    batch = {"dynamicMicroBatches": True, "maxTokensPerDevice": 300}
    own, shared = (size_of(4, batch | {"sharePrompts": share}) for share in (False, True))
    assert own.tokens == shared.tokens == 300
    assert own.scored == pytest.approx(300 * 50 / 149)
    assert shared.scored == pytest.approx(300 * 50 / (100 / 4 + 49))
    assert own.pictured == shared.pictured == 300, "responses may be short"
    assert shared.count < own.count
