"""The mean speeds of an earlier run, computed from its records.

They hold for the same model on the same kind of devices.

    training      device-seconds for each trained token
    generation    tokens per second of a rollout device while it generates: the time in which replicas had no sequence, because they
                  waited for the trainer or it had their devices, does not count. A replica with few sequences counts as
                  busy, so a pool whose window is small could have been faster. In mode Colocated, the time in which some replicas
                  have finished a batch and others have not counts for the latter only
    publication   seconds of the copy, and seconds of transfer and loading together. A pool of another size
                  is assumed to take the same time
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qwen35_trainer.manifest.training import Mode, TrainingSpec
from qwen35_trainer.planning.generation_time import GenerationTime
from qwen35_trainer.planning.publication_time import PublicationTime
from qwen35_trainer.planning.train_time import TrainTime
from qwen35_trainer.progress.records import UpdateRecord

MIN_BUSY_SHARE = 0.02
"""Minimum share of the time in which a pool counts as busy: the measured idle share of a pool that was hardly used is inaccurate."""


class NothingMeasured(ValueError):
    """Raised if a run has no update that trained tokens."""


@dataclass(frozen=True)
class MeasuredRun:
    """The mean speeds of an earlier run."""

    updates: int
    """Number of updates over which the means are taken."""
    device_seconds_per_token: float
    """Seconds of one train device for each trained token, over all passes that an update computes."""
    response: float | None
    """Mean tokens of a response; None in SFT."""
    tokens_per_device_second: float | None
    """Tokens that a rollout device generates per second while it is busy; None in SFT."""
    copy: float
    """Mean seconds for which training waited for the copy of a publication; 0 without publications."""
    publish: float
    """Mean seconds from the end of the copy until all replicas had loaded the version; 0 without publications."""
    mode: Mode | None = None
    """Mode of the measured run; None: not known."""

    @classmethod
    def of(cls, records: Iterable[UpdateRecord], spec: TrainingSpec) -> MeasuredRun:
        """Return the mean speeds of a run.

        records: the update records of the run. spec: the spec of the run. Raises
        NothingMeasured if no update trained tokens.
        """
        trained = [record for record in records if record.tokens > 0]
        tokens = sum(record.tokens + record.masked_tokens for record in trained)
        seconds = sum(record.seconds_training for record in trained)
        if not tokens or not seconds:
            raise NothingMeasured("no update of the run trained a token")
        lengths = [record.response_tokens_mean for record in trained if record.response_tokens_mean]
        publications = [record.seconds_publishing for record in trained if record.seconds_publishing]
        copies = [record.seconds_copying for record in trained if record.seconds_publishing]
        return cls(
            len(trained),
            seconds * spec.world_size / tokens,
            _mean(lengths),
            _busy_rate(trained) / spec.rollout_devices if spec.rollout_devices else None,
            _mean(copies) or 0.0,
            _mean(publications) or 0.0,
            spec.mode,
        )

    def training(self, spec: TrainingSpec, response: float) -> TrainTime:
        """Return the time to train one update of another training, on the same kind of devices.

        spec: the spec of the other training. response: mean tokens of its responses. `passes` of
        the result is 0, because the number of passes is not known.
        """
        tokens = spec.samples_per_update * response
        return TrainTime(0.0, self.device_seconds_per_token * tokens / spec.world_size, 0.0)

    def generation(self, spec: TrainingSpec, response: float) -> GenerationTime | None:
        """Return the time in which the rollout pool of another training generates the responses of one update.

        spec: the spec of the other training. response: mean tokens of its responses. Returns None if the measured run
        generated nothing, or the other training has no rollout pool.
        """
        if not self.tokens_per_device_second or not spec.rollout_devices:
            return None
        rate = self.tokens_per_device_second * spec.rollout_devices
        return GenerationTime(0.0, 0.0, 0.0, spec.samples_per_update * response / rate)

    @property
    def publication(self) -> PublicationTime:
        """The measured time of a publication. The time to load is part of its `transfer`."""
        return PublicationTime(self.copy, self.publish, 0.0)


def _busy_rate(records: list[UpdateRecord]) -> float:
    """Return the tokens per second that a pool generated while its replicas had sequences; 0 if it generated nothing.

    A record has the tokens per second of all the time since the previous batch, and the idle share of the replicas in it.
    """
    tokens = sum((record.tokens_per_second or 0.0) * record.seconds for record in records)
    busy = sum(max(MIN_BUSY_SHARE, 1 - (record.rollout_idle or 0.0)) * record.seconds for record in records)
    return tokens / busy if busy else 0.0


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
