"""Measures the speed of a replica: its worker times the steps, the driver averages the times for the coordinator.

    worker: StepLog.add, once per step ─► MeasuredSteps, in each report ─► driver: StepTimes.add ─► ReplicaTimes ─► coordinator

A load range is a range of numbers of sequences between two powers of two. Steps that only decode are averaged for
each load range. All other steps also prefill: their time beyond the time of decoding alone is divided among the
prefilled tokens. A report has one sum per load range, and a replica has one average per load range, so their size does
not grow with the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.pipeline.replica_times import UNMEASURED, ReplicaTimes
from qwen35_trainer.rollout.rollout_engine import StepOutput

RECENT_STEPS = 200
"""Approximate number of latest steps that count in the average of a load range (steps with a similar
number of sequences)."""
RECENT_PREFILL_TOKENS = 50_000
"""Approximate number of latest prefilled tokens that count in the average duration of prefill."""
RECENT_HAND_OVERS = 20
"""Approximate number of latest hand-overs that count in their average duration. In a hand-over, a replica gives
sequences back that move to another replica."""
OUTLIER = 4.0
"""Multiple of the average duration of similar steps at which the duration of a slow step is cut off.

A step can take seconds for reasons that do not come again, such as a stall of the host. Without this limit, one such
step would change the average for the next RECENT_STEPS steps, and the coordinator might leave the straggler lane empty,
whose steps are then not measured again.
"""
MIN_CHANGE = 0.1
"""Minimum relative change of a duration, or of a number of sequences, before the coordinator gets new times."""


@dataclass(frozen=True)
class DecodeSum:
    """Sums over steps that only decoded, all with a similar number of sequences (one load range)."""

    steps: int
    tokens: int
    """Number of tokens that the steps generated: one for each sequence in each step."""
    seconds: float


@dataclass(frozen=True)
class PrefillSum:
    """Sums over steps with a prefill. They computed prompts or earlier response tokens, and usually decoded too."""

    steps: int = 0
    tokens: int = 0
    """Number of tokens that the steps generated."""
    prefilled: int = 0
    """Number of tokens of prompts and earlier responses that the steps computed."""
    seconds: float = 0.0


NO_PREFILL = PrefillSum()


@dataclass(frozen=True)
class MeasuredSteps:
    """Sums over the steps that a replica's engine has made since the replica's previous report."""

    decode: tuple[DecodeSum, ...] = ()
    prefill: PrefillSum = NO_PREFILL


NO_STEPS = MeasuredSteps()


class StepLog:
    """Adds up the steps of an engine between two reports."""

    def __init__(self) -> None:
        self._decode: dict[int, DecodeSum] = {}  # by load range
        self._prefill = NO_PREFILL
        self._seen: set[int] = set()  # load ranges of all steps so far; 0: those that prefill
        self._usual: dict[int, _Mean] = {}  # load range → duration of a step that only decodes

    def add(self, output: StepOutput, seconds: float) -> None:
        """Add one step. seconds: its duration.

        Steps that only decode are grouped into load ranges by their number of sequences. The first step of each load range, and
        the first step that prefills, do not count, because they may compile the model. The duration of a step that only
        decodes counts as at most OUTLIER times the average of its load range.
        """
        load = 0 if output.prefills else output.tokens.bit_length()
        if load not in self._seen:
            self._seen.add(load)
        elif output.prefills:
            held = self._prefill
            self._prefill = PrefillSum(
                held.steps + 1, held.tokens + output.tokens, held.prefilled + output.prefilled, held.seconds + seconds
            )
        elif output.tokens:
            usual = self._usual.setdefault(load, _Mean(RECENT_STEPS))
            seconds = min(seconds, OUTLIER * usual.value) if usual.weight else seconds
            usual.add(seconds, 1)
            held_sum = self._decode.get(load, DecodeSum(0, 0, 0.0))
            self._decode[load] = DecodeSum(
                held_sum.steps + 1, held_sum.tokens + output.tokens, held_sum.seconds + seconds
            )

    def take(self) -> MeasuredSteps:
        """Return the sums over all steps since the previous call."""
        steps = MeasuredSteps(tuple(self._decode.values()), self._prefill)
        self._decode, self._prefill = {}, NO_PREFILL
        return steps


class _Mean:
    """A moving average. recent: approximate number of latest values that count."""

    __slots__ = ("_recent", "value", "weight")

    def __init__(self, recent: float) -> None:
        self._recent = recent
        self.value = self.weight = 0.0

    def add(self, value: float, count: float) -> None:
        """Add `count` values with the mean `value`."""
        self.weight = min(self.weight + count, self._recent)
        self.value += min(1.0, count / self.weight) * (value - self.value)


class StepTimes:
    """Moving averages of the durations of one replica's decoding, prefill and hand-overs.

    In a hand-over, the replica gives back sequences that move to another replica.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[_Mean, _Mean]] = {}  # load range → (sequences, seconds) of a step
        self._prefill, self._hand_over = _Mean(RECENT_PREFILL_TOKENS), _Mean(RECENT_HAND_OVERS)
        self._returned = UNMEASURED

    def add(self, measured: MeasuredSteps) -> None:
        """Add the sums in a report of the replica."""
        for each in measured.decode:
            sequences = each.tokens / each.steps
            means = self._ranges.setdefault(int(sequences).bit_length(), (_Mean(RECENT_STEPS), _Mean(RECENT_STEPS)))
            means[0].add(sequences, each.steps)
            means[1].add(each.seconds / each.steps, each.steps)
        prefill = measured.prefill
        if prefill.prefilled and self._ranges:
            decoding = prefill.steps * self._times().step_seconds(prefill.tokens / prefill.steps)
            seconds = max(0.0, prefill.seconds - decoding)
            self._prefill.add(seconds / prefill.prefilled, prefill.prefilled)

    def add_hand_over(self, seconds: float) -> None:
        """Add a hand-over: seconds from the order to give sequences back until the replica has given them back."""
        self._hand_over.add(seconds, 1)

    def changed(self) -> ReplicaTimes | None:
        """Return the present averages if they have changed since this method last returned averages; otherwise None.

        They have changed if one of them differs by more than the fraction MIN_CHANGE, or if there are averages for a new
        load range (range of numbers of sequences). The result is also None before the replica's steps are measured.
        """
        times, earlier = self._times(), self._returned
        same_ranges = len(times.steps) == len(earlier.steps)
        if not times.is_measured or (same_ranges and not _differ(_values(times), _values(earlier))):
            return None
        self._returned = times
        return times

    def _times(self) -> ReplicaTimes:
        # The mean of a load range is within the load range, so that the numbers of sequences ascend with the load ranges.
        steps = tuple((sequences.value, seconds.value) for _, (sequences, seconds) in sorted(self._ranges.items()))
        return ReplicaTimes(steps, self._prefill.value, self._hand_over.value)


def _values(times: ReplicaTimes) -> list[float]:
    return [
        *(value for step in times.steps for value in step),
        times.prefill_seconds_per_token,
        times.hand_over_seconds,
    ]


def _differ(values: list[float], earlier: list[float]) -> bool:
    return any(abs(new - old) > MIN_CHANGE * max(abs(old), abs(new)) for new, old in zip(values, earlier, strict=True))
