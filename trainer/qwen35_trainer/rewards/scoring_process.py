"""A scoring process, which decodes and scores the responses of groups, and its messages to and from the driver.

    driver (scoring.py)         this process                            processes of functions (isolated.py)
    ───────────────────         ────────────                            ────────────────────────────────────
    rewards, limits ──────────► build the scorer ─────────────────────► load
                    ◄ problems
    decoder ──────────────────► load it
                    ◄ loaded
    prompt, tokens of a group ► decode, one group after another
                                 ├─► ExactMatch
                                 └────────────────────────────────────► Math, Gym, functions of the user
                    ◄ scores of all
                    ◄ heartbeat, every ALIVE_SECONDS

waits on        unblocked by                                   deadline
next request    the driver, or its death (the socket closes)   none: the process is idle then
decode          the group before it, when it is decoded        none: the driver kills a silent process
score           the rewards                                    the time-out of each call (isolated.py)

Requests are pickled, and replies are JSON. This process does not run code of users. It imports neither torch nor
transformers, so it starts in a fraction of a second. When the driver ends, even by SIGKILL, this process ends the
processes of functions and everything that they have started.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from qwen35_trainer.rewards.child_process import CallServer, RequestPart, signal_when_parent_ends
from qwen35_trainer.rewards.output_file import OutputFile
from qwen35_trainer.rewards.response_decoder import Decode, ResponseDecoder
from qwen35_trainer.rewards.reward import PromptFields, Response, ResponseTokens, RewardSetupError, Score
from qwen35_trainer.rewards.reward_settings import ProcessLimits, RewardsSetup
from qwen35_trainer.rewards.scorer import Scorer, Turn, build_scorer

if TYPE_CHECKING:
    from qwen35_trainer.data.prompt import Prompt

SETUP: Final = b"S"
"""First byte of the request to build the rewards. The reply is a JSON list of problems, which is empty on success."""
DECODER: Final = b"D"
"""First byte of the request to load the decoder. The reply is empty."""
GROUP: Final = b"G"
"""First byte of the request to score a group. `scores_message` encodes the reply."""

ENTRY: Final = f"{__name__}:serve"
ALIVE_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 5.0
"""Maximum time in which this process, before it exits, ends the processes of functions."""
MAX_UNDECODED_BYTES: Final = 64 * 2**20
"""Size of received requests that are not decoded yet, above which no further request is received (backpressure).

Further requests stay in the driver, which holds their tokens anyway."""
_MAX_DETAILED_KINDS: Final = 100
_LENGTH: Final = struct.Struct("<I")
_TOKEN_BYTES: Final = 4


def setup_request(setup: RewardsSetup, limits: ProcessLimits, output: Path | None = None) -> tuple[RequestPart, ...]:
    """Return the request to build the rewards, in parts that are sent one after another.

    output: the file for what functions print; None: functions print where the driver prints.
    """
    return SETUP, pickle.dumps((setup, limits, output))


def decoder_request(decoder: ResponseDecoder) -> tuple[RequestPart, ...]:
    return DECODER, pickle.dumps(decoder)


def group_request(prompt: Prompt, responses: Sequence[ResponseTokens]) -> tuple[RequestPart, ...]:
    """Return the request to score a group, in parts: a header, then the tokens of each response.

    The tokens are memoryviews of `responses`, not copies. Raises RewardError if the prompt's
    metadata cannot be pickled.
    """
    fields = PromptFields.of(prompt)
    sizes = [(len(response.ids), response.truncated) for response in responses]
    header = pickle.dumps((fields.id, fields.answer, fields.content, sizes), protocol=5)
    # memoryview refuses to cast an array without items.
    tokens = [memoryview(response.ids).cast("B") for response in responses if len(response.ids)]
    assert sum(map(len, tokens)) == _TOKEN_BYTES * sum(size for size, _ in sizes), "the ids are int32"
    return GROUP + _LENGTH.pack(len(header)) + header, *tokens


class GroupRequest:
    """A received request to score a group. Its responses are decoded one by one."""

    def __init__(self, content: bytes) -> None:
        start = len(GROUP) + _LENGTH.size
        (length,) = _LENGTH.unpack_from(content, len(GROUP))
        header = pickle.loads(content[start : start + length])  # noqa: S301  # from the driver
        prompt, answer, fields, self._sizes = header
        self._prompt = PromptFields(prompt, answer, fields)
        self.size = len(content)
        """Size of the request in bytes."""
        self._tokens = memoryview(content)[start + length :].cast("i")
        self._next = self._read = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def decode_next(self, decode: Decode) -> Response:
        """Decode the next response of the group, and return it."""
        size, truncated = self._sizes[self._next]
        ids = self._tokens[self._read : self._read + size].tolist()
        self._next += 1
        self._read += size
        return Response(self._prompt, decode(ids), size, truncated)


def scores_message(scores: Sequence[Sequence[Score]]) -> bytes:
    """Encode the scores of each response as JSON: a number for a score, [error, timed out, details]
    for a failed reward.
    """
    return json.dumps([[_plain(score) for score in of_response] for of_response in scores]).encode()


def received_scores(reply: bytes) -> list[list[Score]]:
    """Decode a reply of `scores_message`: a list of scores for each response."""
    return [
        [_failed(*plain) if isinstance(plain, list) else Score(plain) for plain in of_response]
        for of_response in json.loads(reply)
    ]


def _plain(score: Score) -> object:
    return score.value if score.error is None else [score.error, score.timed_out, score.details]


def _failed(error: object, timed_out: object, details: object) -> Score:
    return Score(None, str(error), bool(timed_out), str(details))


def serve(descriptor: int) -> None:
    """Answer the driver's requests until the driver closes the socket or ends, then exit the process.

    descriptor: this process's end of the socket.
    """
    os.set_inheritable(descriptor, False)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_serve(socket.socket(fileno=descriptor)))


async def _serve(connection: socket.socket) -> None:
    process = ScoringProcess()
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    _, server = await loop.create_unix_connection(lambda: CallServer(process.answer), sock=connection)
    process.server = server
    # The driver's death closes the socket. The signal is for the case that a child of it has inherited the other end.
    loop.add_signal_handler(signal.SIGTERM, server.stop)
    signal_when_parent_ends(signal.SIGTERM)
    while True:
        await asyncio.wait([server.ended], timeout=ALIVE_SECONDS)
        if server.ended.done():
            break
        server.show_alive()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            await process.close()
    sys.stdout.flush()
    os._exit(0)  # without waiting for groups under way, which nobody waits for


class ScoringProcess:
    """Answers the driver's requests: to build the rewards, to load the decoder, and to score groups."""

    def __init__(self) -> None:
        self._scorer: Scorer | None = None
        self._output: OutputFile | None = None
        self._decode: Decode | None = None
        self._decoding = asyncio.Lock()
        self._undecoded = 0
        self.server: CallServer | None = None
        """The connection to the driver."""
        self._detailed: set[tuple[int, str]] = set()

    def answer(self, request: bytes) -> Awaitable[bytes]:
        """Return the reply to a request. The first byte of a request is its kind: SETUP, DECODER or GROUP."""
        match request[:1]:
            case kind if kind == SETUP:
                return self._build(*pickle.loads(request[1:]))  # noqa: S301  # from the driver
            case kind if kind == DECODER:
                return self._load(pickle.loads(request[1:]))  # noqa: S301  # from the driver
            case kind:
                assert kind == GROUP
                return self._score(GroupRequest(request))

    async def close(self) -> None:
        if self._scorer is not None:
            await self._scorer.close()
        if self._output is not None:
            await asyncio.to_thread(self._output.close)

    async def _build(self, setup: RewardsSetup, limits: ProcessLimits, output: Path | None) -> bytes:
        if output is not None:
            self._output = OutputFile(output)
        descriptor = None if self._output is None else self._output.descriptor
        try:
            self._scorer = await build_scorer(setup, limits, output=descriptor)
        except RewardSetupError as error:
            return json.dumps(error.problems).encode()
        return json.dumps([]).encode()

    async def _load(self, decoder: ResponseDecoder) -> bytes:
        self._decode = decoder.load()
        _return_free_memory()
        return b""

    async def _score(self, request: GroupRequest) -> bytes:
        assert self._scorer is not None
        self._received(request.size)
        async with self._decoding:  # groups that arrive together are finished one after another, not all at the end
            responses = await self._decoded(request)
        self._received(-request.size)
        del request  # its tokens
        scores = await self._scorer.score(responses)
        return scores_message([self._with_new_details(of_response) for of_response in scores])

    async def _decoded(self, request: GroupRequest) -> list[Response]:
        assert self._decode is not None
        turn, responses = Turn(), []
        for _ in range(len(request)):
            responses.append(request.decode_next(self._decode))
            await turn.let_others_run()
        return responses

    def _received(self, size: int) -> None:
        """Add `size` to the number of received bytes that are not decoded yet. size: negative after decoding.

        While the number exceeds MAX_UNDECODED_BYTES, no further request is received.
        """
        self._undecoded += size
        assert self.server is not None
        if self._undecoded > MAX_UNDECODED_BYTES:
            self.server.pause()
        else:
            self.server.resume()

    def _with_new_details(self, scores: list[Score]) -> list[Score]:
        """Return the scores, with a traceback only for the first error of each kind and reward.

        The driver logs no other tracebacks.
        """
        return [self._with_details_if_new(reward, score) for reward, score in enumerate(scores)]

    def _with_details_if_new(self, reward: int, score: Score) -> Score:
        if not score.details:
            return score
        kind = (reward, score.kind)
        if kind in self._detailed or len(self._detailed) == _MAX_DETAILED_KINDS:
            return replace(score, details="")
        self._detailed.add(kind)
        return score


def _return_free_memory() -> None:
    """Return freed memory to the system, such as 0.3 GB after loading a tokenizer of 248,000 tokens.

    With C libraries other than glibc nothing happens, because they lack `malloc_trim`.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
