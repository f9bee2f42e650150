"""The part of the loop that generates: passes the coordinator's commands to replicas, and the replicas' reports back.

    StartSequences ─► SubmitSequences ─► replica ─► report: started, tokens, finished ─► events ─► coordinator
    MoveSequences ──► TakeSequences ───► source ──► report: taken ─► SubmitSequences ─► target
                                                          all samples of a group finished ─► score ─► GroupScored, GroupFailed

A `Progress` for each replica keeps the tokens that were reported of running sequences, so that they are not lost with the replica.
Without async.partialRollout, the coordinator starts the sequences of a lost replica over. A report about a sequence counts only
if it comes from the replica that holds the sequence. A moving sequence is held by its source until the source reports
it as taken.

A sequence that a replica could not generate is tried once more, by another replica if there is one (`refusals.py`). If that fails too, it
completes its group like any other sequence. It gets no reward, so it does not train. So does a sequence whose replicas are lost again
and again (`suspects.py`). A group fails if none of its samples has a reward, or if a sample has no tokens, because a batch cannot
contain an empty response.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field

from qwen35_trainer.data.encode import EncodedPrompt
from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.manifest import TrainingSpec
from qwen35_trainer.pipeline import commands, notices
from qwen35_trainer.pipeline import events as on
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.progress.recorder import Recorder
from qwen35_trainer.progress.records import SpanRecord
from qwen35_trainer.rewards.combiner import Failures
from qwen35_trainer.rewards.overlong import with_overlong_penalty
from qwen35_trainer.rewards.reward import GENERATION, CombinedScore, GroupScorer, ResponseTokens
from qwen35_trainer.rollout.rollout_engine import (
    NO_TOKENS,
    Completed,
    EndReason,
    GeneratedTokens,
    Sampling,
    SequenceRequest,
)
from qwen35_trainer.runtime.assembly import ScoredGroup
from qwen35_trainer.runtime.measurements import PoolMeter, TrainingClock
from qwen35_trainer.runtime.refusals import Refusals
from qwen35_trainer.runtime.replica_channel import (
    DropSequences,
    EngineReport,
    ReplicaFailed,
    SubmitSequences,
    TakeSequences,
)
from qwen35_trainer.runtime.reported_tokens import Progress
from qwen35_trainer.runtime.rollout_pool import RolloutPool, RolloutReplica
from qwen35_trainer.runtime.step_times import StepTimes
from qwen35_trainer.runtime.stored_choices import NO_CHOICES, StoredChoices, StoredPart
from qwen35_trainer.runtime.suspects import MAX_LOSSES, LossCounts
from qwen35_trainer.weights.probe import ProbeResult

logger = logging.getLogger(__name__)

GIVEN_UP = f"{MAX_LOSSES} or more replicas were lost while they generated responses to this prompt"
"""Error of a sequence that no replica gets any more."""
MAX_LOGGED_FAILURES = 100
"""Maximum number of failed sequences of a run that are logged. The records count all of them."""
FIRST_EVALUATION_GROUP = 1 << 40
"""Number of the first group of an evaluation. Groups that train have lower numbers."""


@dataclass(frozen=True)
class GenerationParts:
    """The objects that `Generation` uses: settings, prompts, scoring, records, and a function that sends events."""

    spec: TrainingSpec
    prompts: Sequence[EncodedPrompt]
    validation: Sequence[EncodedPrompt]
    order: PromptOrder
    scoring: GroupScorer
    recorder: Recorder
    clock: TrainingClock
    tell: Callable[[on.Event], None]
    """Sends an event to the coordinator."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens besides the engines' end token at which a response ends."""


@dataclass(eq=False)
class _PendingGroup:
    """A group that was dispatched or belongs to an evaluation, and whose responses have not been taken yet.

    The sequences of the group finish in any order.
    """

    prompt: EncodedPrompt
    samples: int
    sampling: Sampling
    greedy_last: bool = False
    """Whether the last sample is generated greedily. Its reward is the baseline of the other samples."""
    completed: dict[int, Completed] = field(default_factory=dict)
    choices: dict[int, StoredChoices] = field(default_factory=dict)
    """The experts that were chosen for each completed sequence."""
    scores: tuple[CombinedScore, ...] | None = None

    def sampling_of(self, index: int) -> Sampling:
        """Return the settings with which sample number `index` is generated."""
        if self.greedy_last and index == self.samples - 1:
            return Sampling(temperature=0.0, stop=self.sampling.stop)
        return self.sampling

    @property
    def sequences(self) -> tuple[Completed, ...]:
        """All sequences of the group, in order of their index. The group must be complete."""
        return tuple([self.completed[index] for index in range(self.samples)])


@dataclass(eq=False, slots=True)
class _Sequence:
    """A sequence that has started and not finished."""

    tokens: GeneratedTokens = NO_TOKENS
    """Those with which its holder got it. If no replica holds it: all that are available."""
    choices: StoredChoices = NO_CHOICES
    """Where the experts are that were chosen for `tokens`."""
    holder: int | None = None
    """The replica that generates it."""
    target: int | None = None
    """The replica to which it moves, while it moves."""

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens, if there are more."""
        if length < len(self.tokens):
            self.tokens, self.choices = self.tokens[:length], self.choices.up_to(length)


class Generation:
    """Carries out the coordinator's commands on the rollout pool, and sends the pool's events to the coordinator."""

    pool: RolloutPool

    def __init__(self, parts: GenerationParts, replicas: int) -> None:
        self._parts = parts
        self.meter = PoolMeter(replicas)
        self.failures = Failures()
        """Failed reward calls in groups for training, since the last batch was recorded."""
        self.probe_results: list[ProbeResult] = []
        """Results of the probes that replicas have passed, since the last batch was recorded."""
        self.probes_dropped = 0
        """Number of probes that replicas have dropped, since the last batch was recorded."""
        self.replicas_lost = 0
        """Number of replicas that were lost, since the last batch was recorded."""
        self._groups: dict[int, _PendingGroup] = {}
        self._losses = LossCounts(lambda group: self._groups[group].prompt.prompt.id)
        self._refusals = Refusals()
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._progress: defaultdict[int, Progress] = defaultdict(Progress)  # by replica
        # Takes that the replica has not answered → time of the command, by `time.monotonic`.
        self._taking: dict[tuple[SequenceId, int], float] = {}
        self._times: defaultdict[int, StepTimes] = defaultdict(StepTimes)  # by replica; empty without a lane
        self._tasks: asyncio.TaskGroup | None = None
        self._evaluations = FIRST_EVALUATION_GROUP
        self._failed_sequences = 0

    def run(self, tasks: asyncio.TaskGroup) -> None:
        """Set the task group in which this object starts tasks. Must be called before any command is carried out."""
        self._tasks = tasks

    # Commands and notices of the coordinator.

    def dispatched(self, notice: notices.GroupDispatched) -> None:
        rollout, algorithm = self._parts.spec.rollout, self._parts.spec.algorithm
        assert rollout is not None
        prompt = self._parts.prompts[self._parts.order.prompt_index(notice.position)]
        sampling = Sampling(rollout.temperature, rollout.topP, rollout.topK, rollout.minP, stop=self._parts.stop_tokens)
        self._groups[notice.group] = _PendingGroup(prompt, algorithm.groupSize, sampling, algorithm.has_greedy_baseline)

    def start(self, command: commands.StartSequences) -> None:
        """Submit the sequences of a command to a replica.

        The command states for each sequence how many of its tokens to keep; later tokens are dropped. The stated number
        may be too high: when the coordinator starts a sequence over, its tokens are dropped, but an earlier event may
        still count them. In this case all tokens that the sequence has are kept.
        """
        names = [name for name, _ in command.sequences]
        self._collect(names)
        for name, keep in command.sequences:
            self._sequences.setdefault(name, _Sequence()).cut(keep)
        self._submit(command.replica, names)

    def move(self, command: commands.MoveSequences) -> None:
        names = [name for name in command.sequences if name in self._sequences]  # others have just finished
        for name in names:
            self._sequences[name].target = command.target
        # The source may have refused some, or its loss was reported, while the coordinator decided: they continue at their target.
        free = [name for name in names if self._sequences[name].holder is None]
        held = tuple(name for name in names if name not in free)
        self._taking |= dict.fromkeys(((name, command.source) for name in held), time.monotonic())
        if held and not self.pool.send(command.source, TakeSequences(held)):
            free += [name for name in held if self._given_back(name, command.source)]
        self._hand_over(free)

    def cancel(self, command: commands.CancelSequences) -> None:
        """Drop the sequences of a command from the replicas that generate them.

        A sequence that is moving to `command.replica` is dropped from the replica that still generates it.
        """
        held: dict[int, list[SequenceId]] = {command.replica: []}
        for name in command.sequences:
            sequence = self._sequences.get(name)
            holder = None if sequence is None else sequence.holder
            held.setdefault(command.replica if holder is None else holder, []).append(name)
            if sequence is not None:
                self._leave(name, sequence)
                sequence.target = None
        for replica, names in held.items():
            if names:
                self.pool.send(replica, DropSequences(tuple(names)))

    def forget(self, group: int) -> None:
        """Remove a group that has left the pipeline, with the tokens of its sequences."""
        dropped = self._groups.pop(group)
        self._losses.forget(group)
        for index in range(dropped.samples):
            self._refusals.ended((group, index))
            if (sequence := self._sequences.pop((group, index), None)) is not None:
                self._leave((group, index), sequence)

    def take(self, groups: Sequence[int]) -> list[ScoredGroup]:
        """Remove the groups of a batch from this object, and return them with their rewards, in the order of `groups`."""
        taken = []
        for number in groups:
            group = self._groups[number]
            assert group.scores is not None
            choices = tuple(group.choices[index] for index in range(group.samples))
            taken.append(ScoredGroup(number, group.prompt, group.sequences, group.scores, choices))
            self.forget(number)
        return taken

    def evaluation(self) -> tuple[int, ...]:
        """Create the groups of an evaluation of the held-out prompts. Returns the numbers of the groups."""
        settings = self._parts.spec.evaluation
        first, self._evaluations = self._evaluations, self._evaluations + len(self._parts.validation)
        for number, prompt in enumerate(self._parts.validation, first):
            sampling = Sampling(settings.temperature, stop=self._parts.stop_tokens)
            self._groups[number] = _PendingGroup(prompt, settings.samplesPerPrompt, sampling)
        return tuple(range(first, self._evaluations))

    async def results(self, groups: Sequence[int]) -> list[ScoredGroup]:
        """Score the complete groups of an evaluation, and return them with their scores.

        The groups are removed from this object.
        """
        finished = [self._groups[number] for number in groups]
        scores = await asyncio.gather(*(self._scores(group, in_trial=False) for group in finished))
        for number in groups:
            self.forget(number)
        return [
            ScoredGroup(number, group.prompt, group.sequences, scored)
            for number, group, scored in zip(groups, finished, scores, strict=True)
        ]

    # Reports of the pool.

    def tell(self, event: on.Event) -> None:
        self._parts.tell(event)

    def reported(self, replica: RolloutReplica, report: EngineReport) -> None:
        """Carry out a report of a replica. Raises ReplicaFailed if the replica refuses sequences that others generate."""
        self._measure(replica, report)
        self._time_steps(replica.number, report)
        if report.probed is not None:
            self.probe_results.append(report.probed)
        self.probes_dropped += report.probes_dropped
        progress = self._progress.get(replica.number) or Progress()
        here = progress.sequences
        for name, version in report.started.items():
            if name in here:
                self._refusals.generated(name, replica.number)
                self.tell(on.SequenceStarted(name, version))
        progress.add(report.progress)
        lengths = _lengths_of(here, report.lengths)
        ended = {name: tokens for name, tokens in report.tokens.copies() if name in here}
        self._claim_choices(replica, report, ended)
        for name, reason in report.finished.items():
            if name in ended:
                self._end(replica, Completed(name, ended[name], reason, report.errors.get(name, "")))
        for name in report.taken:
            if name in ended:
                sequence = self._sequences[name]
                self._leave(name, sequence)
                sequence.tokens = ended[name]
                lengths[name] = len(sequence.tokens)
        if lengths:
            self.tell(on.SequencesProgressed(lengths))
        if self._taking:
            ended_here = (*report.taken, *report.finished)
            self._hand_over([name for name in ended_here if self._given_back(name, replica.number)])
        for trusted in self._refusals.take_trusted():
            self.tell(on.ReplicaTrusted(trusted))
        if (failure := self._refusals.failure(replica.number)) is not None:
            raise ReplicaFailed(failure)

    def _end(self, replica: RolloutReplica, completed: Completed) -> None:
        """Finish a sequence, or let it be tried again if the replica could not generate it and no other has tried."""
        name = completed.sequence
        is_error = completed.reason is EndReason.ERROR
        if not is_error:
            self._refusals.generated(name, replica.number)
        if not (is_error and self._refusals.refused(name, replica.number, completed.error)):
            self._finish(completed)
            return
        sequence = self._sequences[name]
        logger.info("%s refused a response, which is tried again: %s", replica.name, completed.error)
        self._leave(name, sequence)
        sequence.tokens = completed.tokens
        if sequence.target is None:  # otherwise it moves on to its target
            self.tell(on.SequenceRefused(name, replica.number, len(sequence.tokens)))

    def _claim_choices(
        self, replica: RolloutReplica, report: EngineReport, ended: Mapping[SequenceId, GeneratedTokens]
    ) -> None:
        """Let sequences that ended on a replica refer to the experts that the replica has recorded for them."""
        own = [(index, name) for index, name in enumerate(report.choices) if name in ended]
        if own:
            call = replica.actor.stored_choices.remote(report.number)
            for index, name in own:
                sequence = self._sequences[name]
                part = StoredPart(call, index, len(sequence.tokens), len(ended[name]))
                sequence.choices = sequence.choices.with_part(part)

    def lost(self, replica: RolloutReplica) -> None:
        """Report to the coordinator that a replica is lost, and how many tokens of each sequence on it remain.

        Sequences that were moving to the lost replica count as its sequences. Sequences that were moving away from the
        lost replica continue at their target, with the tokens that the lost replica had reported.
        """
        gone = replica.number
        self.replicas_lost += 1
        held, moving_away = dict[SequenceId, _Sequence](), []
        for name, sequence in self._sequences.items():
            if sequence.target not in (None, gone):
                if self._given_back(name, gone):
                    moving_away.append(name)
            elif sequence.holder is not None and gone in (sequence.holder, sequence.target):
                held[name] = sequence
        self._taking = {take: at for take, at in self._taking.items() if take[1] != gone}
        self._times.pop(gone, None)
        self._refusals.lost(gone)
        self._collect([*held, *moving_away])
        for sequence in held.values():
            sequence.target = None
        given_up = self._losses.lost(replica.name, list(held), len(self._groups))
        for name in [name for name in held if name[0] in given_up]:
            self._finish(Completed(name, held.pop(name).tokens, EndReason.ERROR, GIVEN_UP))
        self.tell(on.ReplicaLost(gone, {name: len(sequence.tokens) for name, sequence in held.items()}))
        self._hand_over(moving_away)

    def _measure(self, replica: RolloutReplica, report: EngineReport) -> None:
        self.meter.tokens += report.generated
        at = self._parts.clock.at
        for start, end in report.intervals:
            self.meter.add(start, end)
            self._parts.recorder.append(SpanRecord(lane=replica.name, kind="generate", start=at(start), end=at(end)))

    def _time_steps(self, replica: int, report: EngineReport) -> None:
        """Send the step times of a replica to the coordinator if they have changed.

        Without a straggler lane, nothing is sent, because only the coordinator's decisions about the lane use
        the step times.
        """
        rollout = self._parts.spec.rollout
        if rollout is None or rollout.stragglerLane is None:
            return
        times, now = self._times[replica], time.monotonic()
        times.add(report.measured)
        commands = (self._taking.get((name, replica)) for name in report.taken)
        if (first := min((at for at in commands if at is not None), default=None)) is not None:
            times.add_hand_over(now - first)
        if (changed := times.changed()) is not None:
            self.tell(on.ReplicaMeasured(replica, changed))

    def _given_back(self, name: SequenceId, source: int) -> bool:
        """Record that replica `source` no longer generates a sequence.

        Returns whether `source` held the sequence until now. If so, no replica generates the sequence any more.
        """
        was_taking = self._taking.pop((name, source), None) is not None
        sequence = self._sequences.get(name)
        if sequence is None or sequence.holder is None:
            return was_taking
        return sequence.holder == source

    def _hand_over(self, names: Sequence[SequenceId]) -> None:
        """Submit moving sequences, which no replica generates now, to the replicas to which they move."""
        by_target: dict[int, list[SequenceId]] = {}
        for name in names:
            sequence = self._sequences.get(name)
            if sequence is not None and sequence.target is not None:
                by_target.setdefault(sequence.target, []).append(name)
        for target, moved in by_target.items():
            self._submit(target, moved)

    def _submit(self, replica: int, names: Sequence[SequenceId]) -> None:
        """Send sequences, with their tokens, to a replica, which holds the sequences from now on.

        If the replica was requested to give a sequence back, and has not answered yet, the sequence is sent only after
        the answer. Otherwise that answer would count for the sequence that is sent now.
        """
        requests = []
        for name in names:
            sequence = self._sequences[name]
            self._leave(name, sequence)
            if (name, replica) in self._taking:
                sequence.target = replica
            else:
                sequence.holder, sequence.target = replica, None
                self._progress[replica].begin(name)
                requests.append(self._request(name, sequence))
        if requests:
            self.pool.send(replica, SubmitSequences(tuple(requests)))

    def _collect(self, names: Iterable[SequenceId]) -> None:
        """Take sequences from the replicas that hold them, with the tokens that these have reported."""
        by_holder: dict[int, list[SequenceId]] = {}
        for name in names:
            sequence = self._sequences.get(name)
            if sequence is not None and sequence.holder is not None:
                by_holder.setdefault(sequence.holder, []).append(name)
        for holder, held in by_holder.items():
            for name, new in self._progress[holder].read(held).items():
                sequence = self._sequences[name]
                self._leave(name, sequence)
                sequence.tokens = GeneratedTokens.join([sequence.tokens, new])

    def _leave(self, name: SequenceId, sequence: _Sequence) -> None:
        """Record that no replica generates the sequence, and drop the tokens that were reported since its start."""
        if sequence.holder is None:
            return
        progress = self._progress[sequence.holder]
        progress.end(name)
        if not progress.sequences:
            del self._progress[sequence.holder]
        sequence.holder = None

    def _request(self, name: SequenceId, sequence: _Sequence) -> SequenceRequest:
        group = self._groups[name[0]]
        return SequenceRequest(
            name,
            group.prompt.token_ids,
            self._parts.spec.data.maxResponseTokens,
            group.sampling_of(name[1]),
            sequence.tokens,
            group.prompt.pictures,
            trains=name[0] < FIRST_EVALUATION_GROUP,
        )

    def _finish(self, completed: Completed) -> None:
        assert self._tasks is not None
        name = completed.sequence
        sequence, group = self._sequences.pop(name), self._groups[name[0]]
        self._refusals.ended(name)
        self._leave(name, sequence)
        group.completed[name[1]] = completed
        group.choices[name[1]] = sequence.choices
        if completed.reason is EndReason.ERROR:
            self._log_failed(completed, group.prompt)
        self.tell(on.SequenceFinished(name, len(completed.tokens)))
        if len(group.completed) == group.samples and name[0] < FIRST_EVALUATION_GROUP:
            self._tasks.create_task(self._score_group(name[0], group))

    async def _score_group(self, number: int, group: _PendingGroup) -> None:
        scored, spec = await self._scores(group), self._parts.spec
        lengths, limit = [len(sequence.tokens) for sequence in group.sequences], spec.data.maxResponseTokens
        group.scores = scores = with_overlong_penalty(scored, lengths, limit, spec.algorithm.overlongPenalty)
        for score in scores:
            self.failures.add(group.prompt.prompt.id, score)
        if self._groups.get(number) is not group:
            return  # discarded meanwhile
        # DAPO and verl compare what the task rewards, because lengths alone say nothing about the task.
        rewards = [score.value for score in scored if score.value is not None]
        if rewards and all(lengths):
            self.tell(on.GroupScored(number, signal=len(set(rewards)) > 1))
        else:
            errors = (score.first_error(group.prompt.prompt.id) for score in scores if score.errors)
            self.tell(on.GroupFailed(number, next(errors, "")))

    async def _scores(self, group: _PendingGroup, *, in_trial: bool = True) -> tuple[CombinedScore, ...]:
        """Return the score of each sequence. Sequences that could not be generated get an error instead of a score.

        in_trial: whether the responses may belong to the trial: the first responses of a run, of which at least one
        must get a score.
        """
        sequences = group.sequences
        generated = [sequence for sequence in sequences if sequence.reason is not EndReason.ERROR]
        responses = [ResponseTokens(sequence.tokens.ids, sequence.truncated) for sequence in generated]
        scores: tuple[CombinedScore, ...] = ()
        if responses:
            scores = await self._parts.scoring.score_group(group.prompt.prompt, responses, in_trial=in_trial)
        if len(generated) == group.samples:
            return scores
        by_name = {sequence.sequence: score for sequence, score in zip(generated, scores, strict=True)}
        return tuple(
            by_name.get(sequence.sequence) or CombinedScore(None, {}, {GENERATION: sequence.error})
            for sequence in sequences
        )

    def _log_failed(self, completed: Completed, prompt: EncodedPrompt) -> None:
        self._failed_sequences += 1
        if self._failed_sequences <= MAX_LOGGED_FAILURES:
            logger.warning("a response to prompt %s could not be generated: %s", prompt.prompt.id, completed.error)


def _lengths_of(names: KeysView[SequenceId], lengths: Mapping[SequenceId, int]) -> dict[SequenceId, int]:
    """Return a copy of `lengths` without the sequences that are not in `names`."""
    if lengths.keys() <= names:  # nearly always, and much faster than the comprehension
        return dict(lengths)
    return {name: length for name, length in lengths.items() if name in names}
