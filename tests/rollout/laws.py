"""The laws of rollout engines as checks of random histories, for any engine. The laws are listed in `rollout_engine.py`.

check_history(under_test, seed): submits, takes, receives, commits, discards, kills and steps at random, and raises LawBroken
check_versions(under_test): sequences that span three versions have the log-probs of a replay, and of no shifted one
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from qwen35_trainer.data.candidates import Candidates
from qwen35_trainer.models.qwen3_5.decoder import Decoder
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import (
    ENVIRONMENT_VERSION,
    Completed,
    EndReason,
    GeneratedTokens,
    RolloutEngine,
    Sampling,
    SequenceRequest,
    StepOutput,
)
from qwen35_trainer.rollout.version_runs import VersionRuns
from tests.rollout.loading import load

MAX_STEPS = 400
"""More than any history needs until its engine is idle."""


class LawBroken(AssertionError):
    """An engine broke a law. The message begins with its number."""


class Replay:
    """Computes sequences token by token with float32 models of the library by seed, whose weights switch at given positions."""

    def __init__(self, models: Mapping[int, Any], max_length: int) -> None:
        self._states = {seed: model.state_dict() for seed, model in models.items()}
        self._model = copy.deepcopy(models[0])
        self._decoder = Decoder(self._model, 1, max_length)

    def logits(self, seeds: Sequence[int], prefix: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        """(T, V) logits from which each of `ids` is drawn. Token i is computed with the weights of `seeds[i]`, from the state that
        earlier weights left; the prefix with those of the first token."""
        rows = []
        for i, seed in enumerate(seeds):
            if i == 0 or seed != seeds[i - 1]:
                self._model.load_state_dict(self._states[seed])
            inputs = torch.tensor([ids[i - 1]]) if i else None
            rows.append(self._decoder.prefill([list(prefix)], [[0]]) if inputs is None else self._decoder.step(inputs))
        return torch.cat(rows).clone()

    def log_probs(self, seeds: Sequence[int], prefix: Sequence[int], ids: Sequence[int]) -> np.ndarray:
        """(T,) log-probs at temperature 1."""
        chosen = torch.tensor(ids)[:, None]
        return self.logits(seeds, prefix, ids).log_softmax(-1).gather(1, chosen).squeeze(1).numpy()


@dataclass
class UnderTest:
    """An engine, its model's weights by seed, and how exact it is."""

    engine: RolloutEngine
    models: Mapping[int, Any]
    replay: Replay
    end_token: int
    vocabulary: int
    max_length: int
    computes_ahead: int
    """Tokens of a sequence that are drawn after a commit from logits that were computed before it."""
    mean_difference: float
    """Highest mean difference of log-probs from the replayed ones, over all histories."""
    history_difference: float
    """The same for the few log-probs of one history."""
    near_tie: float
    """Difference of the two best logits up to which either may be the most likely token."""
    min_prompt: int = 1
    starts_ahead: int = 0
    """Tokens of a running sequence that `settle` returns."""
    samplings: Sequence[Sampling] = (
        Sampling(),
        Sampling(0.7),
        Sampling(0.0),
        Sampling(stop=(5, 6)),
        Sampling(0.7, top_p=0.75, top_k=20),
    )
    restart: Callable[[], RolloutEngine] | None = None
    """Build the engine that replaces one that was killed. None: it is never killed."""
    seeds: dict[int, int] = field(default_factory=dict)
    """Version → seed of its weights."""
    groups: int = 0
    """Groups that were submitted."""
    differences: list[float] = field(default_factory=list)
    """Of all log-probs that were replayed in histories."""

    @property
    def is_exact(self) -> bool:
        """Whether it computes as the replay does, up to rounding of float32."""
        return self.mean_difference <= 1e-4

    def weights(self, seed: int) -> dict[str, Any]:
        return dict(self.models[seed].named_parameters())

    def load(self, seed: int) -> int:
        """Load the weights of a seed as the next version."""
        version = max(self.seeds, default=0) + 1
        load(self.engine, self.weights(seed), version)
        self.seeds[version] = seed
        return version

    def next_group(self) -> int:
        self.groups += 1
        return self.groups


@dataclass
class _Course:
    """A sequence since it was last submitted."""

    request: SequenceRequest
    grown: list[GeneratedTokens] = field(default_factory=list)
    started: int | None = None


class _History:
    """One random history, and what the engine may do in it."""

    def __init__(self, under_test: UnderTest, seed: int) -> None:
        self.test, self.engine, self.seed = under_test, under_test.engine, seed
        self.random = np.random.default_rng(seed)
        self.live: dict[SequenceId, _Course] = {}
        self.received: tuple[int, int] | None = None  # version, seed
        self.stepped = self.engine.version  # at the last step
        self.completed: list[tuple[_Course, Completed]] = []
        self.watches = bool(self.random.integers(2))  # whether progress is read after every step

    def law(self, number: int, holds: bool, what: str) -> None:
        if not holds:
            raise LawBroken(f"law {number}: {what} (history {self.seed})")

    # What happens.

    def submit(self) -> None:
        length = self.random.integers(self.test.min_prompt, 8)
        prompt = self.random.integers(7, self.test.vocabulary, length).astype(np.int32)
        sampling = self.test.samplings[self.random.integers(len(self.test.samplings))]
        group, limit = self.test.next_group(), int(self.random.integers(1, 12))
        count = int(self.random.integers(1, 4))
        requests = [SequenceRequest((group, index), prompt, limit, sampling) for index in range(count)]
        if self.random.integers(4) == 0 and limit > 2:  # after a tool's output
            kept = GeneratedTokens(
                np.array([8, 9], np.int32), np.zeros(2, np.float32), VersionRuns.of([ENVIRONMENT_VERSION] * 2)
            )
            requests[0] = replace(requests[0], kept=kept)
        wrong = self._wrong() if self.random.integers(3) == 0 else []
        self._submit([*requests[:1], *wrong, *requests[1:]], {request.sequence for request in wrong})

    def _wrong(self) -> list[SequenceRequest]:
        group = self.test.next_group()
        too_long = SequenceRequest((group, 0), np.array([7], np.int32), self.test.max_length)
        return [too_long, SequenceRequest((group, 1), np.array([self.test.vocabulary], np.int32), 3)]

    def _submit(self, requests: Sequence[SequenceRequest], wrong: set[SequenceId]) -> None:
        try:
            refused = self.engine.submit(requests)
        except Exception as error:
            raise LawBroken(f"law 7: submit raised {error!r} (history {self.seed})") from error
        self.law(
            7, {each.sequence for each in refused} == wrong, "other sequences were refused than those that are wrong"
        )
        for each in refused:
            self.law(7, each.reason is EndReason.ERROR and bool(each.error), "a refused sequence has no error")
        self.live |= {each.sequence: _Course(each) for each in requests if each.sequence not in wrong}

    def take(self) -> None:
        if self.random.integers(2):
            self.settle()
        names = [name for name in self.live if self.random.integers(2)]
        before = {name: self.live.pop(name) for name in names}
        taken = self.engine.take([*names, (10**6, 0)])
        self.law(4, taken.keys() == before.keys(), "take returned other sequences than those that were asked for")
        again = []
        for name, tokens in taken.items():
            self._check_tokens(before[name], tokens)
            if self.random.integers(2) and len(tokens) < before[name].request.max_tokens:
                again.append(replace(before[name].request, kept=tokens))
        if again:
            self._submit(again, set())

    def receive(self) -> None:
        version, seed = max(self.test.seeds) + 1 + int(self.random.integers(2)), int(self.random.integers(2))
        before = self.engine.version
        self.engine.receive(self.test.weights(seed), version)
        self.received = version, seed
        self.law(3, self.engine.version == before, "a received version is in service before its commit")

    def receive_wrong(self) -> None:
        weights = self.test.weights(0)
        del weights[next(iter(weights))]
        before = self.engine.version
        try:
            self.engine.receive(weights, max(self.test.seeds) + 9)
        except ValueError:
            self.law(3, self.engine.version == before, "a version that was refused is in service")
            return
        self.law(3, False, "weights without a tensor were received")

    def commit(self) -> None:
        if self.received is None:
            before = self.engine.version
            try:
                self.engine.commit(max(self.test.seeds) + 5)
            except ValueError:
                self.law(3, self.engine.version == before, "a commit that failed changed the version")
                return
            self.law(3, False, "a version that was not received was committed")
        else:
            (version, seed), self.received = self.received, None
            self.settle()
            self.engine.commit(version)
            self.test.seeds[version] = seed
            self.law(3, self.engine.version == version, "a committed version is not in service")

    def discard(self) -> None:
        self.engine.discard()
        self.received = None

    def kill(self) -> None:
        """The engine is lost. Another one of the same version continues its sequences, from the tokens that were reported."""
        version, lost = self.engine.version, [*self.live.values()]
        assert self.test.restart is not None
        self.engine = self.test.engine = self.test.restart()
        load(self.engine, self.test.weights(self.test.seeds[version]), version)
        self.received, self.stepped = None, version
        self.live.clear()
        again = [GeneratedTokens.join([course.request.kept, *course.grown]) for course in lost]
        self._submit([replace(course.request, kept=kept) for course, kept in zip(lost, again, strict=True)], set())

    def progress(self) -> None:
        for name, tokens in self.engine.progress().items():
            self.law(2, name in self.live, f"{name} grew after its end")
            self.law(4, len(tokens) > 0, f"{name} grew by no token")
            self.live[name].grown.append(tokens)

    def step(self) -> None:
        self._output_of(self.engine.step)

    def settle(self) -> None:
        self._output_of(self.engine.settle)

    def _output_of(self, act: Callable[[], StepOutput]) -> None:
        allowed = {self.stepped, self.engine.version}
        before = {name: sum(map(len, course.grown)) for name, course in self.live.items()}
        output = act()
        self.stepped = self.engine.version
        for name, version in output.started.items():
            self.law(2, name in self.live, f"{name} started after its end")
            self.law(4, self.live[name].started is None, f"{name} started twice")
            self.law(1, version in allowed, f"{name} started with version {version}, and {allowed} were in service")
            self.live[name].started = version
        for completed in output.finished:
            self.law(2, completed.sequence in self.live, f"{completed.sequence} ended again, or after it was taken")
            self._finish(self.live.pop(completed.sequence), completed)
        if self.watches:
            self.progress()
            for name, course in self.live.items():
                new = GeneratedTokens.join(course.grown)[before[name] :]
                self.law(3, set(new.versions.tolist()) <= allowed, f"{name} has tokens of neither version")

    # What must hold.

    def _finish(self, course: _Course, completed: Completed) -> None:
        request, tokens = course.request, completed.tokens
        self.law(7, completed.reason is not EndReason.ERROR, f"{completed.sequence} failed: {completed.error}")
        self._check_tokens(course, tokens)
        ends = {self.test.end_token, *request.sampling.stop}
        new = tokens.ids[len(request.kept) :].tolist()
        self.law(8, bool(new), f"{completed.sequence} ended without a new token")
        stopped = new[-1] in ends
        self.law(8, not ends & set(new[:-1]), f"{completed.sequence} continued after a stop token")
        self.law(8, stopped or len(tokens) == request.max_tokens, f"{completed.sequence} ended before its limit")
        reason = EndReason.STOP if stopped else EndReason.LENGTH
        self.law(8, completed.reason is reason, f"{completed.sequence} ended with {completed.reason}, not {reason}")
        self.completed.append((course, completed))

    def _check_tokens(self, course: _Course, tokens: GeneratedTokens) -> None:
        """Check all tokens of a sequence that ends, or is taken: those that it had, those that it reported, those that are new."""
        request, name = course.request, course.request.sequence
        reported = GeneratedTokens.join([request.kept, *course.grown])
        self.law(4, _same(tokens[: len(reported)], reported), f"{name} has other tokens than it reported")
        self.law(4, len(tokens) <= request.max_tokens, f"{name} is longer than its limit")
        self._check_candidates(request, tokens)
        versions = tokens.versions[len(request.kept) :].tolist()
        self.law(
            1, set(versions) <= self.test.seeds.keys(), f"{name} has tokens of versions that were never in service"
        )
        self.law(1, versions == sorted(versions), f"{name} has tokens of an older version after those of a newer one")
        if versions and not len(request.kept):
            self.law(
                1, course.started == versions[0], f"{name} started with version {course.started}, not {versions[0]}"
            )

    def _check_candidates(self, request: SequenceRequest, tokens: GeneratedTokens) -> None:
        name, candidates = request.sequence, tokens.candidates
        drawn = np.flatnonzero(np.asarray(tokens.versions) != ENVIRONMENT_VERSION).tolist()
        if not request.sampling.truncates:
            self.law(6, candidates is None, f"{name} has candidates without truncation")
        elif drawn:
            self.law(6, candidates is not None and len(candidates) == len(tokens), f"{name} has no candidates")
            assert candidates is not None
            for position in drawn:
                own = candidates[position : position + 1].ids
                self.law(6, tokens.ids[position] in own, f"a token of {name} is not among its candidates")

    def _check_log_probs(self, courses: int) -> list[float]:
        """Replay some of the completed sequences. Returns the differences of their log-probs."""
        order = self.random.permutation(len(self.completed))[:courses]
        differences = list[float]()
        for course, completed in (self.completed[index] for index in order):
            start, tokens, sampling = len(course.request.kept), completed.tokens, course.request.sampling
            ids = tokens.ids[start:].tolist()
            seeds = [self.test.seeds[version] for version in tokens.versions[start:].tolist()]
            prefix = [*course.request.prompt.tolist(), *tokens.ids[:start].tolist()]
            logits = self.test.replay.logits(seeds, prefix, ids)
            chosen = torch.tensor(ids)[:, None]
            if sampling.temperature == 0:
                gap = logits.amax(-1) - logits.gather(1, chosen).squeeze(1)
                self.law(5, bool((gap <= self.test.near_tie).all()), f"{completed.sequence} is not the most likely one")
            candidates = None if self.test.is_exact or tokens.candidates is None else tokens.candidates[start:]
            expected = _scaled(logits, sampling, candidates).log_softmax(-1).gather(1, chosen).squeeze(1).numpy()
            differences += np.abs(expected - tokens.log_probs[start:]).tolist()
        return differences

    def end(self) -> None:
        """Step until nothing is left, then check the log-probs of some sequences."""
        for _ in range(MAX_STEPS):
            if not self.engine.busy:
                break
            self.step()
        self.law(8, not self.engine.busy, f"still busy after {MAX_STEPS} steps")
        self.law(8, not self.live, f"{sorted(self.live)} never ended")
        if differences := self._check_log_probs(2):
            self.test.differences += differences
            mean = float(np.mean(differences))
            self.law(
                6, mean <= self.test.history_difference, f"log-probs differ by {mean:.4f} from those of their weights"
            )


def check_history(under_test: UnderTest, seed: int) -> int:
    """Play one random history. Returns its number of completed sequences. Raises LawBroken."""
    history = _History(under_test, seed)
    acts: dict[str, tuple[Callable[[], None], int]] = {
        "step": (history.step, 10),
        "submit": (history.submit, 4),
        "take": (history.take, 2),
        "receive": (history.receive, 2),
        "commit": (history.commit, 2),
        "progress": (history.progress, 1),
        "discard": (history.discard, 1),
        "receive wrong": (history.receive_wrong, 1),
    }
    if under_test.restart is not None:
        acts["kill"] = history.kill, 1
    weights = np.array([weight for _, weight in acts.values()], float)
    room = under_test.engine.token_room
    for name in history.random.choice([*acts], size=20, p=weights / weights.sum()):
        acts[str(name)][0]()
    history.end()
    under_test.engine.discard()
    history.law(8, under_test.engine.token_room == room, "memory of sequences that have ended is not free")
    return len(history.completed)


def check_histories(under_test: UnderTest, seeds: Iterable[int]) -> int:
    """Play a random history for each seed. Returns the number of completed sequences. Raises LawBroken."""
    completed = sum(check_history(under_test, seed) for seed in seeds)
    mean = float(np.mean(under_test.differences))
    if mean > under_test.mean_difference:
        raise LawBroken(f"law 6: all log-probs together differ by {mean:.4f} from those of their weights")
    return completed


def check_versions(under_test: UnderTest) -> None:
    """Let twelve sequences, which need a slot each, span three versions. Replays with the weights switched at the recorded positions, and earlier state kept, give
    each token's log-prob; replays with a switch one token earlier or later do not."""
    engine, random = under_test.engine, np.random.default_rng(3)
    first = under_test.load(0)
    requests = [
        SequenceRequest((under_test.next_group(), 0), random.integers(7, under_test.vocabulary, 9).astype(np.int32), 24)
        for _ in range(12)
    ]
    assert engine.submit(requests) == ()
    finished: dict[SequenceId, Completed] = {}
    for seed in (1, 0, None):
        outputs = [engine.step() for _ in range(8 if seed is not None else 40)]
        outputs.append(engine.settle())
        finished |= {completed.sequence: completed for output in outputs for completed in output.finished}
        if seed is not None:
            under_test.load(seed)
    assert engine.version == first + 2
    ahead, each = under_test.computes_ahead, 8 + under_test.starts_ahead
    expected = [first] * (each + ahead) + [first + 1] * each + [first + 2] * (24 - 2 * each - ahead)
    exact, its_own, shifted = list[float](), list[float](), list[float]()
    for request in requests:
        tokens = finished[request.sequence].tokens
        assert tokens.versions.tolist() == expected[: len(tokens)]
        seeds, ids = [under_test.seeds[version] for version in tokens.versions.tolist()], tokens.ids.tolist()
        prompt = request.prompt.tolist()
        difference = np.abs(under_test.replay.log_probs(seeds, prompt, ids) - tokens.log_probs)
        exact += difference.tolist()
        for moved in (seeds[:1] + seeds[:-1], seeds[1:] + seeds[-1:]):
            at = [i for i in range(len(ids)) if moved[i] != seeds[i]]
            wrong = np.abs(under_test.replay.log_probs(moved, prompt, ids) - tokens.log_probs)
            its_own += difference[at].tolist()
            shifted += wrong[at].tolist()
    assert np.mean(exact) <= under_test.mean_difference
    assert len(shifted) >= (20 if under_test.is_exact else 8), "enough sequences lived through a switch"
    ratio = np.mean(shifted) / np.mean(its_own)
    assert ratio > (10 if under_test.is_exact else 5), f"{np.mean(shifted):.4f} and {np.mean(its_own):.4f}"


def _scaled(logits: torch.Tensor, sampling: Sampling, candidates: Candidates | None) -> torch.Tensor:
    """Logits of the distribution that is drawn from.

    candidates: those that the engine reports, if its logits differ too much from these to say where top-p ends.
    """
    scaled = logits / (sampling.temperature or 1.0)
    if sampling.top_p < 1 and candidates is not None:
        kept = torch.zeros_like(scaled, dtype=torch.bool)
        kept[np.repeat(np.arange(len(candidates)), candidates.counts), candidates.ids.astype(np.int64)] = True
        scaled = scaled.masked_fill(~kept, float("-inf"))
    elif sampling.top_k:
        lowest = scaled.topk(sampling.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < lowest, float("-inf"))
    if sampling.top_p < 1 and candidates is None:
        likely, order = scaled.softmax(-1).sort(-1, descending=True)
        dropped = (likely.cumsum(-1) - likely >= sampling.top_p).gather(1, order.argsort(-1))
        scaled = scaled.masked_fill(dropped, float("-inf"))
    return scaled


def _same(left: GeneratedTokens, right: GeneratedTokens) -> bool:
    same = all(np.array_equal(getattr(left, part), getattr(right, part)) for part in ("ids", "log_probs", "versions"))
    first, second = (each.candidates or Candidates.whole_vocabulary(len(each)) for each in (left, right))
    return same and np.array_equal(first.counts, second.counts) and np.array_equal(first.ids, second.ids)
