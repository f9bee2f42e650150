"""A scoring process without the process: its requests and replies."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from qwen35_trainer.data import Prompt, character_tokenizer
from qwen35_trainer.manifest.rewards import RewardSpec
from qwen35_trainer.rewards import scorer, scoring_process
from qwen35_trainer.rewards.response_decoder import ResponseDecoder
from qwen35_trainer.rewards.reward import ResponseTokens, Score
from qwen35_trainer.rewards.reward_settings import ProcessLimits, RewardsSetup
from qwen35_trainer.rewards.scoring_process import (
    ScoringProcess,
    decoder_request,
    group_request,
    received_scores,
    scores_message,
    setup_request,
)

TOKENIZER = character_tokenizer("0123456789")


class Connection:
    """Remembers whether requests are received."""

    def __init__(self) -> None:
        self.paused = False
        self.pauses = 0

    def pause(self) -> None:
        self.pauses += not self.paused
        self.paused = True

    def resume(self) -> None:
        self.paused = False


async def opened() -> tuple[ScoringProcess, Connection]:
    process = ScoringProcess()
    process.server = connection = Connection()
    setup = RewardsSetup.of([RewardSpec.model_validate({"type": "ExactMatch"})], (), Path())
    assert await process.answer(b"".join(setup_request(setup, ProcessLimits()))) == b"[]"
    await process.answer(b"".join(decoder_request(ResponseDecoder.of(TOKENIZER))))
    return process, connection


def request(*texts: str, answer: str) -> bytes:
    responses = [ResponseTokens(np.array(TOKENIZER.encode(text), np.int32), truncated=False) for text in texts]
    return b"".join(bytes(part) for part in group_request(Prompt("s/0", "s", "?", answer), responses))


async def test_groups_that_arrive_together_are_scored_in_order_each_with_its_own_answer() -> None:
    process, _ = await opened()
    order: list[int] = []

    async def score(number: int) -> list[float | None]:
        scores = received_scores(await process.answer(request(*map(str, range(4)), answer=str(number))))
        order.append(number)
        return [score.value for [score] in scores]

    assert await asyncio.gather(*map(score, range(4))) == np.eye(4).tolist()
    assert order == [0, 1, 2, 3]


async def test_no_more_requests_are_received_while_many_wait_for_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "TURN_SECONDS", 0.0)  # others run between two responses
    process, connection = await opened()
    content = request("0" * 10_000, "1", answer="1")
    monkeypatch.setattr(scoring_process, "MAX_UNDECODED_BYTES", 2 * len(content))
    await asyncio.gather(process.answer(content), process.answer(content))
    assert connection.pauses == 0
    await asyncio.gather(*(process.answer(content) for _ in range(3)))
    assert (connection.pauses, connection.paused) == (1, False)


def test_scores_arrive_as_they_were() -> None:
    scores = [
        [Score(0.1 + 0.2), Score(None, "Timeout: no\nscore", timed_out=True)],
        [Score(-1e-300), Score(None, "KeyError: 'ä€\\ud800'", details="line 1\nline 2")],
    ]
    assert received_scores(scores_message(scores)) == scores
