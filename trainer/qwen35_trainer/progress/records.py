"""The records of a training run: one JSON line each in metrics.jsonl.

    driver ─► Recorder ─► metrics.jsonl ─► summary.json · report.html
                      └─► sinks, view

The file is the only source: the summary, the report and every sink are derived from these records. A line is
`{"record": "update", ...}` with the attribute names below. Numbers that are not finite (a diverged loss) are written as
the strings "NaN", "Infinity" and "-Infinity", so that every line is valid JSON. None means that the run has no such value,
for example no reward in SFT.

All times are seconds since the training first started, across attempts.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

type SpanKind = Literal["load", "generate", "train", "publish", "evaluate", "checkpoint"]
type RunOutcome = Literal["Succeeded", "Stopped", "Failed"]

MAX_TRACEBACK_CHARACTERS: Final = 8000

_JSON: Final = ConfigDict(extra="ignore", ser_json_inf_nan="strings")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """One optimizer step. Means are over the samples or trained tokens of this update, on all ranks."""

    __pydantic_config__ = _JSON

    update: int
    """1 for the first optimizer step."""
    updates_total: int
    version: int
    """Weight version this update trained at."""
    time: float
    prompts: int
    samples: int
    tokens: int
    """Tokens that entered the loss."""
    masked_tokens: int = 0
    """Tokens left out of the loss because they were older than the bound or outside a correction's mask."""
    loss: float
    gradient_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    seconds: float
    """Time since the end of the previous update."""
    seconds_waiting: float = 0.0
    """The part of `seconds` during which the train pool had no batch. This part and the following ones up to
    `seconds_driver` add up to `seconds`."""
    seconds_assembling: float = 0.0
    """The part during which the driver made the batch from the groups."""
    seconds_training: float = 0.0
    seconds_copying: float = 0.0
    """The part during which the weights were copied for a publication. Training waits for the copy, not for the publication."""
    seconds_saving: float = 0.0
    """The part during which a checkpoint copied the state. Training waits for the copy, not for the files."""
    seconds_evaluating: float = 0.0
    """The part during which the train pool evaluated: SFT only."""
    seconds_driver: float = 0.0
    """The rest: the driver's own work between these parts."""
    seconds_publishing: float = 0.0
    """From the end of the copy until all replicas have the weights; overlaps the parts above."""
    reward_mean: float | None = None
    reward_std: float | None = None
    response_tokens_mean: float | None = None
    response_tokens_max: int | None = None
    truncated_share: float | None = None
    """Share of samples, 0 to 1, that reached the response limit."""
    policy_loss: float | None = None
    entropy: float | None = None
    """Entropy of the policy, nats per token."""
    kl: float | None = None
    """KL divergence of the policy from the reference, nats per token."""
    behaviour_kl: float | None = None
    """KL divergence of the rollout policy from the trainer's on the same tokens, nats per token."""
    clip_fraction: float | None = None
    correction_weight_mean: float | None = None
    router_load_balancing: float | None = None
    """Load-balancing loss of the routers, mean over tokens and layers, before its coefficient."""
    router_z: float | None = None
    """Z-loss of the routers, mean over tokens and layers, before its coefficient."""
    lag_mean: float | None = None
    """Versions between a token and its training, over the trained tokens."""
    lag_max: int | None = None
    lag_histogram: dict[int, int] = field(default_factory=dict)
    """Trained tokens by lag."""
    window_dispatched: int | None = None
    """Groups that count against the window."""
    window_limit: int | None = None
    """Maximum of `window_dispatched`."""
    rollout_idle: float | None = None
    """Share, 0 to 1, of the slot time of the rollout pool without a sequence since the previous update."""
    train_idle: float | None = None
    """Share, 0 to 1, of the time since the previous update during which the train pool waited."""
    tokens_per_second: float | None = None
    """Tokens that the whole rollout pool generated per second since the previous update."""
    score_by_reward: dict[str, float] = field(default_factory=dict)
    """Reward → mean of its scores, before its weight. A failed call counts 0 with onError Zero and is left out with Skip."""
    reward_by_source: dict[str, float] = field(default_factory=dict)
    """Data source → mean reward of the samples of its prompts."""
    reward_errors: int = 0
    """Failed reward calls since the previous update, in trained and untrained groups: the sum of the next two fields."""
    errors_by_reward: dict[str, int] = field(default_factory=dict)
    timeouts_by_reward: dict[str, int] = field(default_factory=dict)
    first_reward_error: str = ""
    """Reward, prompt and reason of the first failed call."""
    groups_without_signal: int = 0
    """Trained groups whose rewards were all equal: they have no advantage and no gradient.

    With `algorithm.dynamicSampling` such groups leave untrained instead, as "filtered".
    """
    groups_left: dict[str, int] = field(default_factory=dict)
    """Groups that left untrained since the previous update, by reason: filtered, discarded, failed."""
    wall_time: float | None = None
    """`time` as Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Measures of the held-out prompts after `update` updates. Update 0 is the initial model.

    SFT has a loss, and other modes have the other measures.
    """

    __pydantic_config__ = _JSON

    update: int
    version: int
    time: float
    samples: int
    accuracy: float | None = None
    """Share, 0 to 1, of the responses to which every reward gives at least 1."""
    reward_mean: float | None = None
    """A response without a reward, because a reward call failed with onError Skip, counts 0."""
    score_by_reward: dict[str, float] = field(default_factory=dict)
    """As in `UpdateRecord`."""
    reward_by_source: dict[str, float] = field(default_factory=dict)
    errors_by_reward: dict[str, int] = field(default_factory=dict)
    timeouts_by_reward: dict[str, int] = field(default_factory=dict)
    first_reward_error: str = ""
    response_tokens_mean: float | None = None
    loss: float | None = None
    """Negative log-likelihood, nats per target token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One bar of the timeline, from `start` to `end`.

    lane: the row of the bar, such as "rollout-0", "train-0", "publish" or "checkpoint".
    """

    __pydantic_config__ = _JSON

    lane: str
    kind: SpanKind
    start: float
    end: float
    label: str = ""
    version: int | None = None
    """The version that a publication brought to the replicas."""
    busy: float | None = None
    """Seconds of work between `start` and `end`, of a span that stands for several (`span_budget.py`). None: all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A complete, verified checkpoint. `seconds`: the time to write it."""

    __pydantic_config__ = _JSON

    update: int
    version: int
    time: float
    path: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """The export of a checkpoint as a Hugging Face folder at `path`. `problem`: why it was not written, or empty."""

    __pydantic_config__ = _JSON

    update: int
    version: int
    time: float
    path: str
    seconds: float
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRecord:
    """The outcome of this attempt, and its reason."""

    __pydantic_config__ = _JSON

    outcome: RunOutcome
    message: str
    time: float
    reason: str = ""
    """The class of the error that ended it, or empty."""
    traceback: str = ""
    """The end of the traceback of a failure, at most MAX_TRACEBACK_CHARACTERS."""
    wall_time: float | None = None
    """`time` as Unix seconds."""


type RunRecord = UpdateRecord | EvaluationRecord | SpanRecord | CheckpointRecord | ExportRecord | FinishRecord

_CLASSES: Final[dict[str, type[RunRecord]]] = {
    "update": UpdateRecord,
    "evaluation": EvaluationRecord,
    "span": SpanRecord,
    "checkpoint": CheckpointRecord,
    "export": ExportRecord,
    "finish": FinishRecord,
}
TIME_PARTS: Final = ("training", "waiting", "assembling", "copying", "saving", "evaluating", "driver")
"""The parts of the time between two updates: `UpdateRecord.seconds_<part>`. Their sum is `UpdateRecord.seconds`."""
_NAMES: Final = {cls: name for name, cls in _CLASSES.items()}
_LINE_START: Final = '{"record":"'
_FORMER_NAMES: Final = {"trainer_idle": "train_idle"}
"""Names of attributes in files of earlier releases, and their present names."""
_ADAPTERS: Final[dict[type[RunRecord], TypeAdapter[RunRecord]]] = {cls: TypeAdapter(cls) for cls in _NAMES}


def writable(text: str) -> str:
    r"""Replace lone surrogates, which UTF-8 cannot encode, by escapes such as \ud800.

    Exception messages may contain them, and a record that contains one cannot be written.
    """
    return text.encode(errors="backslashreplace").decode()


def to_line(record: RunRecord) -> str:
    """Encode a record as one line of JSON, without the newline."""
    fields = _ADAPTERS[type(record)].dump_json(record).decode()
    return f'{{"record":"{_NAMES[type(record)]}",{fields.removeprefix("{")}'


def line_start[R: RunRecord](kind: type[R]) -> bytes:
    """Return how the lines of a class of records begin."""
    return f'{{"record":"{_NAMES[cast("type[RunRecord]", kind)]}",'.encode()


def from_line(line: str) -> RunRecord:
    """Decode a line of this or an earlier release. Unknown keys are ignored, so that older readers can open newer files.

    Raises ValueError that names the wrong field if the line is not a record.
    """
    if (record := _from_present_line(line)) is not None:
        return record
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    name = fields.get("record") if isinstance(fields, dict) else None
    if name not in _CLASSES:
        raise ValueError(f"record {name!r} is not one of {', '.join(_CLASSES)}")
    try:
        return _ADAPTERS[_CLASSES[name]].validate_python(
            {_FORMER_NAMES.get(key, key): value for key, value in fields.items()}
        )
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
        raise ValueError(f"record {name!r}: {problems}") from error


def _from_present_line(line: str) -> RunRecord | None:
    """Decode a valid line of this release, four times as fast as any line. None for any other line."""
    name = line[len(_LINE_START) :].partition('"')[0] if line.startswith(_LINE_START) else ""
    if name not in _CLASSES or any(former in line for former in _FORMER_NAMES):
        return None
    try:
        return _ADAPTERS[_CLASSES[name]].validate_json(line)
    except ValidationError:
        return None


def surviving_updates(records: Iterable[RunRecord]) -> list[UpdateRecord]:
    """Return the updates that led to the final weights, in order.

    An attempt that resumes from a checkpoint repeats the updates after that checkpoint. The earlier records of these
    updates are left out.
    """
    kept: list[UpdateRecord] = []
    for record in records:
        if isinstance(record, UpdateRecord):
            while kept and kept[-1].update >= record.update:
                kept.pop()
            kept.append(record)
    return kept


def surviving_evaluations(records: Sequence[RunRecord]) -> list[EvaluationRecord]:
    """Return the evaluations of the updates that led to the final weights, in order, at most one per update."""
    kept: list[EvaluationRecord] = []
    for record in records:
        if isinstance(record, UpdateRecord):
            while kept and kept[-1].update >= record.update:
                kept.pop()
        elif isinstance(record, EvaluationRecord):
            while kept and kept[-1].update >= record.update:
                kept.pop()
            kept.append(record)
    return kept


def latest[R: RunRecord](records: Sequence[RunRecord], kind: type[R]) -> R | None:
    """Return the last record of a class. None if there is none."""
    return next((record for record in reversed(records) if isinstance(record, kind)), None)
