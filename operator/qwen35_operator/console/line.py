"""One training as a line of a log, for where no screen can be redrawn."""

from datetime import datetime

from qwen35_operator.console.seen import Seen
from qwen35_operator.console.words import left, waits, why
from qwen35_trainer.progress import formatting


def line(seen: Seen, now: datetime) -> str:
    """`12:03:04 Running update=412/1000 version=410 …`: what exists, in UTC."""
    progress = seen.status.progress
    fields: dict[str, str | None] = {}
    if progress is not None:
        total = "" if progress.updates is None else f"/{progress.updates}"
        fields = {
            "update": f"{progress.update}{total}",
            "version": str(progress.version),
            "reward": _shown(progress.reward, ".3f"),
            "accuracy": _shown(progress.accuracy, ".3f"),
            "held-out-reward": _shown(progress.heldOutReward, ".3f"),
            "lag": None if progress.lagMean is None else f"{progress.lagMean:.2f}/{progress.lagMax}",
            "tokens/s": _shown(progress.tokensPerSecond, ".0f"),
            "left": None if (seconds := left(seen, now)) is None else formatting.duration(seconds).replace(" ", ""),
        }
    fields |= {pool.name: f"{pool.ready}/{pool.desired}" for pool in seen.status.pools}
    numbers = [f"{name}={value}" for name, value in fields.items() if value is not None]
    missing = "".join(f" [{kind}: {meaning}]" for kind, meaning in waits(seen))
    said = " ".join(why(seen).split())
    return " ".join([f"{now:%H:%M:%S}", seen.state, *numbers, *([f"· {said}"] if said else [])]) + missing


def _shown(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
