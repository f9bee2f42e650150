"""A run as lines, for logs and grep."""

from typing import Final, Self

from rich.console import Console

from qwen35_trainer.progress.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExportRecord,
    FinishRecord,
    Record,
    UpdateRecord,
)
from qwen35_trainer.progress.state import RunState

_NONE: Final = "-"


class LineView:
    """One line per event, `update=3/40 reward=0.612 …`, for logs and grep. Lines are never broken."""

    def __init__(self, console: Console, run: RunState) -> None:
        self._console = console
        self._run = run
        self._line(f"run={run.name} folder={run.folder}")

    def phase(self, text: str) -> None:
        self._line(f"phase={text}")

    def write(self, record: Record) -> None:
        self._run.add(record)
        match record:
            case UpdateRecord():
                self._line(" ".join(f"{name}={value}" for name, value in _update_fields(self._run, record)))
            case EvaluationRecord():
                value = f"loss={record.loss:.4f}" if record.accuracy is None else f"accuracy={record.accuracy:.4f}"
                self._line(f"evaluation={record.update} {value} samples={record.samples}")
            case CheckpointRecord():
                self._line(f"checkpoint={record.path} update={record.update} seconds={record.seconds:.1f}")
            case ExportRecord():
                problem = f" problem={' '.join(record.problem.split())}" if record.problem else ""
                self._line(f"export={record.path} update={record.update} seconds={record.seconds:.1f}{problem}")
            case FinishRecord():
                self._line(f"outcome={record.outcome} seconds={record.time:.0f} message={record.message}")

    def close(self) -> None:
        """Nothing is held back: every line is already out."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


def _update_fields(run: RunState, update: UpdateRecord) -> list[tuple[str, str]]:
    def shown(value: float | None, form: str) -> str:
        return _NONE if value is None else format(value, form)

    left = run.seconds_left()
    return [
        ("update", f"{update.update}/{update.updates_total}"),
        ("version", str(update.version)),
        ("reward", shown(update.reward_mean, ".3f")),
        ("loss", shown(update.loss, ".4g")),
        ("response", shown(update.response_tokens_mean, ".1f")),
        ("lag", f"{shown(update.lag_mean, '.2f')}/{shown(update.lag_max, 'd')}"),
        ("idle", f"{shown(update.rollout_idle, '.0%')}/{shown(update.trainer_idle, '.0%')}"),
        ("tokens/s", shown(update.tokens_per_second, ".0f")),
        ("seconds", f"{update.seconds:.1f}"),
        ("left", shown(left, ".0f")),
    ]
