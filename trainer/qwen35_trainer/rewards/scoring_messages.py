"""The messages between the driver and a scoring process. Requests are pickled by the driver; replies are JSON."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from qwen35_trainer.rewards.child_process import RequestPart
from qwen35_trainer.rewards.process_limits import ProcessLimits
from qwen35_trainer.rewards.response_decoder import Decode, ResponseDecoder
from qwen35_trainer.rewards.reward import PromptFields, Response, ResponseTokens, Score
from qwen35_trainer.rewards.reward_settings import RewardsSetup

if TYPE_CHECKING:
    from qwen35_trainer.data.prompt import Prompt

SETUP: Final = b"S"
"""First byte of the request to build the rewards. The reply is the list of problems."""
DECODER: Final = b"D"
"""First byte of the request to load the decoder. The reply is empty."""
GROUP: Final = b"G"
"""First byte of the request to score a group. The reply is `scores_message`."""

_LENGTH: Final = struct.Struct("<I")
_TOKEN_BYTES: Final = 4


def setup_request(setup: RewardsSetup, limits: ProcessLimits) -> tuple[RequestPart, ...]:
    return SETUP, pickle.dumps((setup, limits))


def decoder_request(decoder: ResponseDecoder) -> tuple[RequestPart, ...]:
    return DECODER, pickle.dumps(decoder)


def group_request(prompt: Prompt, responses: Sequence[ResponseTokens]) -> tuple[RequestPart, ...]:
    """Return the parts of a request.

    The tokens are not copied. Raises RewardError for metadata that cannot be pickled.
    """
    fields = PromptFields.of(prompt)
    sizes = [(len(response.ids), response.truncated) for response in responses]
    header = pickle.dumps((fields.id, fields.answer, fields.content, sizes), protocol=5)
    # memoryview refuses to cast an array without items.
    tokens = [memoryview(response.ids).cast("B") for response in responses if len(response.ids)]
    assert sum(map(len, tokens)) == _TOKEN_BYTES * sum(size for size, _ in sizes), "the ids are int32"
    return GROUP + _LENGTH.pack(len(header)) + header, *tokens


class GroupRequest:
    """A received request to score a group, whose responses are decoded one by one."""

    def __init__(self, content: bytes) -> None:
        start = len(GROUP) + _LENGTH.size
        (length,) = _LENGTH.unpack_from(content, len(GROUP))
        header = pickle.loads(content[start : start + length])  # noqa: S301  # from the driver
        prompt, answer, fields, self._sizes = header
        self._prompt = PromptFields(prompt, answer, fields)
        self.size = len(content)
        """Bytes of the request."""
        self._tokens = memoryview(content)[start + length :].cast("i")
        self._next = self._read = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def decode_next(self, decode: Decode) -> Response:
        """Return the next response."""
        size, truncated = self._sizes[self._next]
        ids = self._tokens[self._read : self._read + size].tolist()
        self._next += 1
        self._read += size
        return Response(self._prompt, decode(ids), size, truncated)


def scores_message(scores: Sequence[Sequence[Score]]) -> bytes:
    """Encode the scores of each response: a number for a score, [error, timed out, details] for a failure."""
    return json.dumps([[_plain(score) for score in of_response] for of_response in scores]).encode()


def received_scores(reply: bytes) -> list[list[Score]]:
    """Decode the scores of each response."""
    return [[_score(plain) for plain in of_response] for of_response in json.loads(reply)]


def _plain(score: Score) -> object:
    return score.value if score.error is None else [score.error, score.timed_out, score.details]


def _score(plain: float | list[object]) -> Score:
    if not isinstance(plain, list):
        return Score(plain)
    error, timed_out, details = plain
    return Score(None, str(error), bool(timed_out), str(details))
