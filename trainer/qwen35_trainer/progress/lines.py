"""Displays a run as lines of text, for logs and grep."""

from collections.abc import Mapping
from typing import Final, Self

from rich.console import Console

from qwen35_trainer import formatting
from qwen35_trainer.progress.held_out import accuracy_is_meaningful
from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    FinishRecord,
    RunRecord,
    UpdateRecord,
)
from qwen35_trainer.progress.state import RunState

_NONE: Final = "-"


class LineView:
    """Prints a line for each record except spans, such as `update=3/40 reward=0.612 …`. Lines are never wrapped."""

    def __init__(self, console: Console, run: RunState) -> None:
        self._console = console
        self._run = run
        self._line(f"run={run.name} folder={run.folder}")

    def phase(self, text: str) -> None:
        self._line(f"phase={text}")

    def write(self, record: RunRecord) -> None:
        failed_before = bool(self._run.first_reward_error)
        self._run.add(record)
        if self._run.first_reward_error and not failed_before:
            self._line(f"reward_error={formatting.excerpt(self._run.first_reward_error)}")
        match record:
            case UpdateRecord():
                self._line(" ".join(f"{name}={value}" for name, value in _update_fields(self._run, record)))
            case EvaluationRecord():
                self._line(" ".join(f"{name}={value}" for name, value in _evaluation_fields(record)))
            case CheckpointRecord():
                self._line(f"checkpoint={record.path} update={record.update} seconds={record.seconds:.1f}")
            case ExportRecord():
                problem = f" problem={_one_line(record.problem)}" if record.problem else ""
                self._line(f"export={record.path} update={record.update} seconds={record.seconds:.1f}{problem}")
            case FinishRecord():
                self._line(f"outcome={record.outcome} seconds={record.time:.0f} message={_one_line(record.message)}")

    def close(self) -> None:
        """Do nothing, because every line is printed immediately."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


def _update_fields(run: RunState, update: UpdateRecord) -> list[tuple[str, str]]:
    return [
        ("update", f"{update.update}/{update.updates_total}"),
        ("version", str(update.version)),
        ("reward", _format(update.reward_mean, ".3f")),
        *_parts("reward", update.score_by_reward),
        *_parts("source", update.reward_by_source),
        ("errors", str(update.reward_errors)),
        ("loss", _format(update.loss, ".4g")),
        ("response", _format(update.response_tokens_mean, ".1f")),
        ("lag", f"{_format(update.lag_mean, '.2f')}/{_format(update.lag_max, 'd')}"),
        ("idle", f"{_format(update.rollout_idle, '.0%')}/{_format(update.train_idle, '.0%')}"),
        ("tokens/s", _format(update.tokens_per_second, ".0f")),
        ("seconds", f"{update.seconds:.1f}"),
        ("left", _format(run.seconds_left(), ".0f")),
    ]


def _evaluation_fields(evaluation: EvaluationRecord) -> list[tuple[str, str]]:
    """Return the fields (name, value) of an evaluation's line.

    The value of accuracy is `-` if accuracy gives no information, as for graded rewards (see `held_out.py`).
    """
    samples = ("samples", str(evaluation.samples))
    if evaluation.loss is not None:
        return [("evaluation", str(evaluation.update)), ("loss", f"{evaluation.loss:.4f}"), samples]
    meaningful = accuracy_is_meaningful([(evaluation.accuracy, evaluation.reward_mean)])
    return [
        ("evaluation", str(evaluation.update)),
        ("accuracy", _format(evaluation.accuracy if meaningful else None, ".1%")),
        *((f"pass@{k}", f"{share:.1%}") for k, share in evaluation.pass_at_k.items() if meaningful),
        ("reward", _format(evaluation.reward_mean, ".3f")),
        *_parts("reward", evaluation.score_by_reward),
        *_parts("source", evaluation.reward_by_source),
        samples,
    ]


def _parts(name: str, values: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return one field (name, value) with the mean of each reward or data source.

    The list is empty if there is only one reward or source, because the line already shows its mean.
    """
    return [(f"{name}.{part}", f"{value:.3f}") for part, value in values.items()] if len(values) > 1 else []


def _format(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _one_line(text: str) -> str:
    return " ".join(text.split())
