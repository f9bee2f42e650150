"""The records of a training run: one JSON line each in metrics.jsonl.

    driver ─► Recorder ─► metrics.jsonl ─► summary.json · report.html
                      └─► sinks, view

The file is the only source: the summary, the report and every sink are derived from these records. A line is
`{"record": "update", ...}` with the attribute names below. Numbers that are not finite (a diverged loss) are written as
the strings "NaN", "Infinity" and "-Infinity", so that every line is valid JSON. None means that the run has no such value,
for example no reward in SFT.

All times except `wall_time` are seconds since the training first started, across attempts.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError

type SpanKind = Literal["load", "generate", "train", "publish", "evaluate", "checkpoint", "turn"]
type RunOutcome = Literal["Succeeded", "Stopped", "Failed"]

MAX_TRACEBACK_CHARACTERS: Final = 8000

_JSON: Final = ConfigDict(extra="ignore", ser_json_inf_nan="strings")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """The measures of one update (optimizer step). A mean is over all samples, or all trained tokens, of the update."""

    __pydantic_config__ = _JSON

    update: int
    """Number of the update. The first update of the run has number 1."""
    updates_total: int
    """Number of updates of the whole run."""
    version: int
    """Version of the weights at which the update's batch trained.

    The lag of a token is counted back from this version.
    """
    time: float
    """Time, in seconds since the training first started, at which the batch of the update had trained."""
    prompts: int
    """Number of prompts that trained in this update."""
    samples: int
    """Number of samples that trained in this update."""
    tokens: int
    """Number of tokens that entered the loss."""
    masked_tokens: int = 0
    """Number of tokens left out of the loss because their lag exceeds the maximum lag. The first update of a batch has
    the number for the whole batch, and the other updates have 0."""
    loss: float
    """Value of the loss that the update minimised, over the samples of the update."""
    gradient_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    """Learning rate of the update."""
    seconds: float
    """Seconds from the end of the previous batch to the end of this one. If a batch has several updates, the first one
    has this value, and the other ones have 0. The same holds for every `seconds_<part>`."""
    seconds_waiting: float = 0.0
    """The part of `seconds` during which the train pool waited for a batch. The parts `seconds_<part>`, with the names
    in `TIME_PARTS`, add up to `seconds`."""
    seconds_assembling: float = 0.0
    """The part of `seconds` during which the driver assembled the batch from its groups."""
    seconds_training: float = 0.0
    """The part of `seconds` during which the train pool trained the batch."""
    seconds_copying: float = 0.0
    """The part of `seconds` during which the train ranks copied the weights for a publication, or computed the
    log-probs of its probe. Training waits for both, but not for the rest of the publication."""
    seconds_saving: float = 0.0
    """The part of `seconds` during which the train ranks copied their state for a checkpoint. Training waits for the
    copy, but not until the files are written."""
    seconds_evaluating: float = 0.0
    """The part of `seconds` during which the train pool evaluated. It is 0 in modes other than SFT."""
    seconds_driver: float = 0.0
    """The part of `seconds` that belongs to no other part: work of the driver."""
    seconds_publishing: float = 0.0
    """Seconds from the command to send copied weights until all replicas have loaded them, for publications that ended
    since the previous batch. Training continues meanwhile."""
    reward_mean: float | None = None
    """Mean reward of the samples of the update."""
    reward_std: float | None = None
    """Standard deviation of the rewards of the samples of the update."""
    response_tokens_mean: float | None = None
    """Mean number of tokens in a response."""
    response_tokens_max: int | None = None
    """Number of tokens in the longest response."""
    truncated_share: float | None = None
    """Share of samples, 0 to 1, that reached the response limit."""
    policy_loss: float | None = None
    """Mean policy loss per token, multiplied by the weights of the correction, without KL penalty and entropy."""
    entropy: float | None = None
    """Mean entropy of the policy, in nats per token."""
    kl: float | None = None
    """Mean KL divergence of the policy from the reference model, in nats per token."""
    kl_coefficient: float | None = None
    """Coefficient of the KL penalty with which the update trained, if `algorithm.kl.adaptive` adapts it. None:
    it is fixed."""
    behaviour_kl: float | None = None
    """Mean KL divergence of the policy that generated the tokens from the trainer's policy, in nats per token (K3
    estimate). It contains the train-inference mismatch and the effect of lag."""
    probe_difference_mean: float | None = None
    """Train-inference mismatch: mean absolute difference, in nats, between the log-probs that a replica and the trainer
    compute for the same tokens with the same version. It is the largest mean of all probes that replicas have passed
    since the previous batch. None: they have passed no probe."""
    probe_difference_max: float | None = None
    """Train-inference mismatch of the worst token: the largest absolute difference, in nats, in all probes that
    replicas have passed since the previous batch. None: they have passed no probe."""
    probes_passed: int = 0
    """Number of probes that replicas have passed since the previous batch. Each replica has one probe per version."""
    probes_skipped: int = 0
    """Number of versions since the previous batch without a probe, because the train ranks' forward pass for it would
    have taken too much time. If this grows with each version and `probes_passed` stays 0, nothing compares replicas
    with the trainer."""
    probes_dropped: int = 0
    """Number of probes since the previous batch that replicas dropped without a result, because a later version came
    into service first or no slot became free within `publication.timeoutSeconds`."""
    clip_fraction: float | None = None
    """Share of the trained tokens, 0 to 1, whose ratio the loss clipped."""
    correction_weight_mean: float | None = None
    """Mean weight of a token in the off-policy correction."""
    router_load_balancing: float | None = None
    """Load-balancing loss of the routers (mixture of experts), mean over tokens and layers, not multiplied by its
    coefficient."""
    router_z: float | None = None
    """Z-loss of the routers (mixture of experts), mean over tokens and layers, not multiplied by its coefficient."""
    mtp_nll: float | None = None
    """Mean negative log-likelihood, in nats, of the trained tokens under the head for multi-token prediction, which predicts each token
    from the tokens up to two positions before it and the embedding of the one in between. Not multiplied by its weight."""
    saved_token_share: float | None = None
    """Share, 0 to 1, of the input tokens of the update that the train pool did not compute, because the samples of a group
    shared their prompt. None: `train.batch.sharePrompts` is false."""
    replayed_token_share: float | None = None
    """Share, 0 to 1, of the input tokens of the update that the train pool computed with the experts that the rollout chose
    for them. It is below 1 if choices were lost with a replica. None: `train.router.replay` is false."""
    lag_mean: float | None = None
    """Mean lag of the trained tokens of the batch: versions between the generation of a token and its training."""
    lag_max: int | None = None
    """Maximum lag of a trained token of the batch, in versions."""
    lag_histogram: dict[int, int] = field(default_factory=dict)
    """Lag in versions → number of trained tokens. The first update of a batch counts the tokens of the whole batch, and
    the other updates have an empty mapping."""
    window_dispatched: int | None = None
    """Number of groups that count against the window, which limits how many groups may be in the pipeline."""
    window_limit: int | None = None
    """Maximum number of groups that may count against the window."""
    rollout_idle: float | None = None
    """Share, 0 to 1, of the time since the previous batch during which a replica had no sequence to generate, averaged
    over the replicas. A replica with a single sequence counts as busy."""
    train_idle: float | None = None
    """Share, 0 to 1, of the time since the previous batch during which the train pool waited for a batch:
    `seconds_waiting` over `seconds`. Assembling, copying, saving and evaluating do not count as idle."""
    tokens_per_second: float | None = None
    """Tokens that the whole rollout pool generated per second since the previous batch."""
    replicas_lost: int | None = None
    """Number of replicas that were lost since the previous batch, including replicas on nodes that were removed to
    shrink the pool. None: the run has no replicas (SFT), or an earlier release recorded it."""
    score_by_reward: dict[str, float] = field(default_factory=dict)
    """Name of a reward → mean of its unweighted scores. A failed call counts as 0 with `onError: Zero`, and is left out
    with `onError: Skip`."""
    reward_by_source: dict[str, float] = field(default_factory=dict)
    """Data source → mean reward of the samples of its prompts."""
    calls_by_reward: dict[str, int] = field(default_factory=dict)
    """Name of a reward → number of its calls since the previous batch, failed ones included. Empty in the records of
    earlier releases."""
    reward_errors: int = 0
    """Number of failed reward calls since the previous batch, in trained and untrained groups: the sum over
    `errors_by_reward` and `timeouts_by_reward`."""
    errors_by_reward: dict[str, int] = field(default_factory=dict)
    """Name of a reward → number of its calls since the previous batch that ended with an error other than a
    time-out."""
    timeouts_by_reward: dict[str, int] = field(default_factory=dict)
    """Name of a reward → number of its calls since the previous batch that timed out."""
    first_reward_error: str = ""
    """Reward, prompt and reason of the first failed reward call since the previous batch; empty if none failed."""
    groups_without_signal: int = 0
    """Number of groups of the update whose rewards were all equal (zero variance), so that they have no advantage
    and no gradient.

    With `algorithm.dynamicSampling` such groups do not train, and `groups_left` counts them as "filtered" instead.
    """
    groups_left: dict[str, int] = field(default_factory=dict)
    """Reason (filtered, discarded, failed) → number of groups that left the pipeline untrained since
    the previous batch."""
    wall_time: float | None = None
    """Wall-clock time of the record, in Unix seconds; `time` is the same moment in training time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The measures of the held-out prompts after `update` updates. Update 0 is the initial model.

    In SFT, the only measure is `loss`. In other modes, all measures except `loss` exist.
    """

    __pydantic_config__ = _JSON

    update: int
    """Number of updates before the evaluation; 0 for the initial model."""
    version: int
    """Version of the weights that generated the responses; 0 in SFT."""
    time: float
    """Time at which the evaluation ended, in seconds since the training first started."""
    samples: int
    """Number of held-out responses or, in SFT, examples."""
    accuracy: float | None = None
    """Share, 0 to 1, of the responses to which every reward with a weight above 0 gives at least 1."""
    pass_at_k: dict[int, float] = field(default_factory=dict)
    """k → pass@k: the probability, 0 to 1, that at least one of k responses to a prompt is accurate, estimated from all
    responses to the prompt, and averaged over prompts. k is each power of 2 up to `evaluation.samplesPerPrompt`, and
    that number. Empty with one sample per prompt, where pass@1 is the accuracy."""
    reward_mean: float | None = None
    """Mean reward of the held-out responses. A response without a reward (failed, with `onError: Skip`) counts as 0."""
    score_by_reward: dict[str, float] = field(default_factory=dict)
    """Name of a reward → mean of its unweighted scores. A failed call counts as 0 with `onError: Zero`, and is left out
    with `onError: Skip`."""
    reward_by_source: dict[str, float] = field(default_factory=dict)
    """Data source → mean reward of the responses to its prompts; a response without a reward counts as 0."""
    errors_by_reward: dict[str, int] = field(default_factory=dict)
    """Name of a reward → number of its calls in this evaluation that ended with an error other than a time-out."""
    timeouts_by_reward: dict[str, int] = field(default_factory=dict)
    """Name of a reward → number of its calls in this evaluation that timed out."""
    first_reward_error: str = ""
    """Reward, prompt and reason of the first failed reward call in this evaluation; empty if none failed."""
    response_tokens_mean: float | None = None
    """Mean number of tokens in a response."""
    loss: float | None = None
    """Mean negative log-likelihood of the held-out examples, in nats per target token (SFT)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """A span: the time from `start` to `end` in which a lane (a row of the timeline) did one thing.

    The timeline shows a span as a bar.
    """

    __pydantic_config__ = _JSON

    lane: str
    """The row of the timeline, such as "rollout-0", "train-0", "publish", "checkpoint", or "devices" for the turns of the pools
    in mode Colocated."""
    kind: SpanKind
    """What the lane did."""
    start: float
    """Start of the span, in seconds since the training first started."""
    end: float
    """End of the span, in seconds since the training first started."""
    label: str = ""
    """Text that the timeline shows for the bar."""
    version: int | None = None
    """The version that the replicas loaded, if the span is a publication. None for other spans."""
    busy: float | None = None
    """Seconds of work between `start` and `end`, if several spans were joined to this one (`span_budget.py`). None: all
    of the time was work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint was written completely."""

    __pydantic_config__ = _JSON

    update: int
    """Number of updates that the checkpoint contains."""
    version: int
    """Version of the weights in the checkpoint."""
    time: float
    """Time at which the checkpoint became complete, in seconds since the training first started."""
    path: str
    """Folder of the checkpoint."""
    seconds: float
    """Seconds from the beginning of the save until the checkpoint was complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """A checkpoint was exported as a Hugging Face folder, or the export failed."""

    __pydantic_config__ = _JSON

    update: int
    """Number of updates that the exported checkpoint contains."""
    version: int
    """Version of the weights in the exported checkpoint."""
    time: float
    """Time at which the export ended, in seconds since the training first started."""
    path: str
    """The Hugging Face folder, which does not exist if the export failed."""
    seconds: float
    """Seconds that the export took."""
    problem: str = ""
    """Why the export failed; empty if it succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRecord:
    """The outcome of one attempt of the run, and the reason for it."""

    __pydantic_config__ = _JSON

    outcome: RunOutcome
    """How the attempt ended."""
    message: str
    """Explanation for people."""
    time: float
    """Time at which the attempt ended, in seconds since the training first started."""
    reason: str = ""
    """Failure reason (docs/failure-modes.md). Empty unless the outcome is Failed."""
    traceback: str = ""
    """The last MAX_TRACEBACK_CHARACTERS characters of a failure's traceback. Empty unless the outcome is Failed."""
    wall_time: float | None = None
    """Wall-clock time of the record, in Unix seconds; `time` is the same moment in training time."""


type RunRecord = UpdateRecord | EvaluationRecord | SpanRecord | CheckpointRecord | ExportRecord | FinishRecord

CLASSES: Final[dict[str, type[RunRecord]]] = {
    "update": UpdateRecord,
    "evaluation": EvaluationRecord,
    "span": SpanRecord,
    "checkpoint": CheckpointRecord,
    "export": ExportRecord,
    "finish": FinishRecord,
}
"""Value of the key `record` of a line → class of the record."""
TIME_PARTS: Final = ("training", "waiting", "assembling", "copying", "saving", "evaluating", "driver")
"""The parts of the time between two batches: `UpdateRecord.seconds_<part>`. Their sum is `UpdateRecord.seconds`."""
_NAMES: Final = {cls: name for name, cls in CLASSES.items()}
_LINE_START: Final = '{"record":"'
_FORMER_NAMES: Final = {"trainer_idle": "train_idle"}
"""Names of attributes in files of earlier releases, each with its present name."""
_ADAPTERS: Final[dict[type[RunRecord], TypeAdapter[RunRecord]]] = {cls: TypeAdapter(cls) for cls in _NAMES}


def writable(text: str) -> str:
    r"""Replace lone surrogates, which UTF-8 cannot encode, by escapes such as \ud800.

    Exception messages may contain lone surrogates, and a record with such a message could not be written.
    """
    return text.encode(errors="backslashreplace").decode()


def to_line(record: RunRecord) -> str:
    """Encode a record as one line of JSON, without the newline."""
    fields = _ADAPTERS[type(record)].dump_json(record).decode()
    return f'{{"record":"{_NAMES[type(record)]}",{fields.removeprefix("{")}'


def line_start[R: RunRecord](kind: type[R]) -> bytes:
    """Return the bytes with which every line of a record of the class `kind` begins."""
    return f'{{"record":"{_NAMES[cast("type[RunRecord]", kind)]}",'.encode()


def from_line(line: str) -> RunRecord:
    """Decode a line that this or another release wrote. Unknown keys, which newer releases may write, are ignored.

    Raises ValueError, with the name of the wrong field, if the line is not a record.
    """
    if (record := _from_present_line(line)) is not None:
        return record
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    name = fields.get("record") if isinstance(fields, dict) else None
    if name not in CLASSES:
        raise ValueError(f"record {name!r} is not one of {', '.join(CLASSES)}")
    try:
        return _ADAPTERS[CLASSES[name]].validate_python(
            {_FORMER_NAMES.get(key, key): value for key, value in fields.items()}
        )
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
        raise ValueError(f"record {name!r}: {problems}") from error


def _from_present_line(line: str) -> RunRecord | None:
    """Decode a line that has exactly the form in which this release writes it. Returns None for any other line.

    This takes a quarter of the time of decoding a line of another form.
    """
    name = line[len(_LINE_START) :].partition('"')[0] if line.startswith(_LINE_START) else ""
    if name not in CLASSES or any(former in line for former in _FORMER_NAMES):
        return None
    try:
        return _ADAPTERS[CLASSES[name]].validate_json(line)
    except ValidationError:
        return None


def surviving_updates(records: Iterable[RunRecord]) -> list[UpdateRecord]:
    """Return the updates that led to the final weights, in order.

    An attempt that resumes from a checkpoint repeats the updates after that checkpoint. The records of these updates by
    earlier attempts are left out.
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
    """Return the last record of the class `kind`, or None if `records` contains no record of that class."""
    return next((record for record in reversed(records) if isinstance(record, kind)), None)
