"""Score the responses of groups in scoring processes, so that the driver's event loop does no decoding or scoring.

    generation ─► score_group ─────► the scoring process with the smallest ─► combine      ─► a CombinedScore
                  prompt, tokens     number of groups                         (combiner.py)   for each response

If a scoring process dies, another one starts in its place, and its unfinished groups are scored once more.

waits on           unblocked by                                             deadline
open               the processes, when rewards and decoder are loaded,      START_SECONDS
                   or when loading failed
score_group        the process, or its death                                the time-out of each call (isolated.py)
a silent process   its heartbeat, every ALIVE_SECONDS                       SILENT_SECONDS, then it is killed
close              the processes, when they have ended their worker         CLOSE_SECONDS + _REST_SECONDS, then they are
                   processes                                                killed

Only the groups in the pipeline, whose number is limited, and those of one evaluation wait here. The driver holds these
groups anyway, so no unbounded queue can form. The wait does not count towards timeoutSeconds. The driver sends one
request per group and receives one reply. It does not copy the tokens for the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from qwen35_trainer.rewards.child_process import ChildEnded, ChildProcess, RequestPart, end_all
from qwen35_trainer.rewards.combiner import Combiner
from qwen35_trainer.rewards.isolated import LOAD_SECONDS
from qwen35_trainer.rewards.response_decoder import ResponseDecoder
from qwen35_trainer.rewards.reward import CombinedScore, ResponseTokens, RewardError, RewardSetupError, Score
from qwen35_trainer.rewards.reward_settings import ProcessLimits, RewardsSetup
from qwen35_trainer.rewards.scoring_process import (
    ALIVE_SECONDS,
    CLOSE_SECONDS,
    ENTRY,
    decoder_request,
    group_request,
    received_scores,
    setup_request,
)

if TYPE_CHECKING:
    from pathlib import Path

    from qwen35_trainer.data.prompt import Prompt

logger = logging.getLogger(__name__)

START_SECONDS: Final = LOAD_SECONDS + 60.0
SILENT_SECONDS: Final = 60.0
MAX_REPLY_BYTES: Final = 2**30
"""Maximum size of a reply with the scores of a group.

Each score may carry a message and a traceback of 16,000 characters, and a group may have many responses and rewards.
"""
_TRIES: Final = 2
"""Maximum number of scoring processes that try to score a group.

If all of them die, every reward counts as failed for the group."""
_REST_SECONDS: Final = 1.0
"""Time in which a scoring process must exit after the CLOSE_SECONDS in which it ends its worker processes."""


@dataclass(eq=False)
class _Place:
    """A place for one scoring process. When the process has died, another process is started in the same place."""

    process: asyncio.Task[ChildProcess]
    number: int
    groups: int = 0
    """Number of groups that the process is scoring."""
    warned_of: asyncio.Task[ChildProcess] | None = None
    """The last process whose end was logged. Only one warning is logged per process, however many
    groups it was scoring."""

    @property
    def over(self) -> bool:
        """Whether the process could not be started or has ended."""
        return self.process.done() and (self.process.exception() is not None or not self.process.result().alive)

    def warn(self, process: asyncio.Task[ChildProcess], text: str) -> None:
        """Log a warning about the end of `process`, unless the last warning was about the same process."""
        if self.warned_of is not process:
            self.warned_of = process
            logger.warning("%s", text)


class Scoring:
    """Scores the groups of one run. It implements GroupScorer.

    This is an asynchronous context manager. Entering it starts the scoring processes without waiting for them. `open`
    waits until they can score. Leaving it ends them. Only one event loop may use the object, and the thread of this
    loop must live until the object is closed.
    """

    def __init__(self, setup: RewardsSetup, limits: ProcessLimits, *, trial: int = 0, logs: Path | None = None) -> None:
        """Store the settings. No process is started yet.

        trial: number of responses that form the trial, the first ones of the run. `score_group` raises RewardFailed if
          every reward fails for all of them. 0: no trial.
        logs: the folder for the output of functions, one file of limited size per scoring process. None: functions
          print where this process prints.
        """
        self._setup, self._limits, self._logs = setup, limits, logs
        self._combiner = Combiner(setup.terms, trial)
        self._places: list[_Place] = []
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._decoder: asyncio.Future[ResponseDecoder] = asyncio.get_running_loop().create_future()
        self._places = [
            _Place(asyncio.create_task(self._start(number)), number) for number in range(self._limits.scoring)
        ]
        self._watch = asyncio.create_task(self._end_silent())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Ids of the scoring processes that are running."""
        started = [place.process for place in self._places if place.process.done() and not place.over]
        return tuple(task.result().process_id for task in started)

    async def open(self, decoder: ResponseDecoder) -> None:
        """Send the decoder to the scoring processes, and wait until all of them can score.

        Raises RewardSetupError with every problem of the rewards. Also raises ChildEnded if a process dies,
        TimeoutError after START_SECONDS, and OSError if a process cannot be started.
        """
        self._decoder.set_result(decoder)
        await asyncio.gather(*(asyncio.shield(place.process) for place in self._places))

    async def close(self) -> None:
        """End the scoring processes. Groups that are being scored fail. May be called again."""
        places, self._places = self._places, []
        tasks = [place.process for place in places]
        if self._watch is not None:
            tasks.append(self._watch)  # type: ignore[arg-type]  # its result is not used
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        started = [task.result() for task in tasks[: len(places)] if not task.cancelled() and task.exception() is None]
        await end_all(started, patience=CLOSE_SECONDS + _REST_SECONDS)

    async def score_group(
        self, prompt: Prompt, responses: Sequence[ResponseTokens], *, in_trial: bool
    ) -> tuple[CombinedScore, ...]:
        """Return the combined score of each response, in order.

        in_trial: whether the responses count towards the trial, which consists of the first responses of the run.
        Raises RewardFailed if a reward with `onError: Fail` could not score, or if every reward has failed for every
        response of the trial. All rewards of the group count as failed if every scoring process that tried the group
        died, or if the group cannot be sent to a scoring process.
        """
        try:
            scores = await self._scores(group_request(prompt, responses))
        except RewardError as error:
            failed = Score.failed(error)
            scores = [[failed] * len(self._setup.terms)] * len(responses)
        return self._combiner.combined_group(prompt.id, scores, in_trial=in_trial)

    async def _scores(self, request: tuple[RequestPart, ...]) -> list[list[Score]]:
        """Send a group to a scoring process, and return the scores of each response.

        Raises RewardError if every process that tried the group died.
        """
        how = ""
        for _ in range(_TRIES):
            place = self._next_place()
            place.groups += 1
            started = place.process
            try:
                process = await asyncio.shield(started)
                return received_scores(await process.call(*request))
            except ChildEnded as ended:
                how = ended.how
                place.warn(started, f"a scoring process ended ({how}); its groups are scored again, once")
            except (OSError, RewardSetupError, TimeoutError) as error:
                how = f"{type(error).__name__}: {error}"
                place.warn(started, f"a scoring process could not be started again: {how}")
            finally:
                place.groups -= 1
        raise RewardError(f"the scoring process died ({how}), and the one after it", kind="WorkerDied")

    def _next_place(self) -> _Place:
        """Return the place whose process is scoring the smallest number of groups. If that process has
        ended, start another one.

        Raises RewardError if scoring is closed.
        """
        if not self._places:
            raise RewardError("scoring is closed", kind="Closed")
        place = min(self._places, key=lambda place: place.groups)
        if place.over:
            place.process = asyncio.create_task(self._start(place.number))
        return place

    async def _start(self, number: int) -> ChildProcess:
        """Start a scoring process, wait until it can score, and return it.

        number: number of the place, which names the log file. Raises RewardSetupError if rewards cannot be
        built, ChildEnded if the process dies, TimeoutError if loading takes too long, and OSError if the
        process cannot be started.
        """
        output = None if self._logs is None else self._logs / f"rewards-{number}.log"
        process = await ChildProcess.start(ENTRY, max_reply_bytes=MAX_REPLY_BYTES)
        try:
            built = process.call(*setup_request(self._setup, self._limits, output), seconds=START_SECONDS)
            loading = asyncio.ensure_future(self._load_decoder(process))
            try:
                if problems := json.loads(await built):
                    raise RewardSetupError(problems)
                await loading
            finally:
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
        except BaseException:
            await process.end(CLOSE_SECONDS + _REST_SECONDS)
            raise
        return process

    async def _load_decoder(self, process: ChildProcess) -> None:
        decoder = await asyncio.shield(self._decoder)
        await process.call(*decoder_request(decoder), seconds=START_SECONDS)

    async def _end_silent(self) -> None:
        """Kill each process that is scoring groups but has sent nothing for SILENT_SECONDS, because it
        hangs or is stopped.

        The task runs until it is cancelled.
        """
        suspects: set[ChildProcess] = set()
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            silent = {process for process in self._working() if time.monotonic() - process.heard > SILENT_SECONDS}
            # Twice, because this loop may have been blocked. What has arrived meanwhile is read before the next turn.
            for process in silent & suspects:
                logger.warning(
                    "scoring process %d has been silent for %g s; it is ended", process.process_id, SILENT_SECONDS
                )
                await process.end()
            suspects = silent

    def _working(self) -> list[ChildProcess]:
        started = [place.process for place in self._places if place.groups and not place.over]
        return [task.result() for task in started if task.done()]
