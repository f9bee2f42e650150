"""What a finished run says last."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from qwen35_trainer.runtime.run import Finished


def print_end(console: Console, finished: Finished) -> None:
    """The numbers that matter, and where the rest lies."""
    summary, folder = finished.summary, finished.folder
    table = Table.grid(padding=(0, 2))
    for name, value in _rows(finished):
        table.add_row(name, value)
    console.print(f"\n{finished.finish.outcome}: {summary['updates']} updates in {summary['seconds']:.0f} s")
    console.print(table)
    if finished.finish.outcome == "Stopped":
        saved = summary["checkpoint"]
        said = f"Saved to {saved}" if saved else "Nothing was saved"
        console.print(f"{said}; go on with --resume auto", soft_wrap=True)
    if summary["exportProblem"]:
        console.print(f"Not exported: {summary['exportProblem']}", soft_wrap=True)
        console.print(f"Try again with: qwen35 export {summary['checkpoint']} --output DIR", soft_wrap=True)
    elif summary["export"]:
        console.print(f"Model:  {summary['export']}", soft_wrap=True)
    console.print(f"Report: {folder.root / 'report.html'}", soft_wrap=True)


def _rows(finished: Finished) -> list[tuple[str, str]]:
    summary = finished.summary
    rows: list[tuple[str, str]] = []
    before, after = summary["accuracyBefore"], summary["accuracyAfter"]
    if before is not None and after is not None:
        rows.append(("held-out accuracy", f"{before:.2f} → {after:.2f}"))
    loss_before, loss_after = summary["heldOutLossBefore"], summary["heldOutLossAfter"]
    if loss_before is not None and loss_after is not None:
        rows.append(("held-out loss", f"{loss_before:.3f} → {loss_after:.3f} nats per token"))
    if summary["maxTokenLag"] is not None:
        rows.append(("greatest token lag", f"{summary['maxTokenLag']} versions (bound {summary['maxVersionLag']})"))
    if summary["rolloutIdle"] is not None and summary["trainerIdle"] is not None:
        rows.append(("idle", f"rollout {summary['rolloutIdle']:.0%}, trainer {summary['trainerIdle']:.0%}"))
    if summary["tokensPerSecond"] is not None:
        rows.append(("generated", f"{summary['tokensPerSecond']:.0f} tokens/s"))
    if summary["rewardErrors"]:
        rows.append(("reward errors", str(summary["rewardErrors"])))
    return rows
