"""The report of a run: one HTML file that needs no network."""

import json
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

import yaml

from qwen35_trainer import formatting
from qwen35_trainer.page import figure_card, render_page, write_page
from qwen35_trainer.progress.charts import charts
from qwen35_trainer.progress.curves import Chart
from qwen35_trainer.progress.held_out import summary_measures
from qwen35_trainer.progress.records import FinishRecord
from qwen35_trainer.progress.run_fold import RunFold
from qwen35_trainer.progress.sample_file import SAMPLES_FILE_NAME, read_samples
from qwen35_trainer.progress.sample_section import sample_section
from qwen35_trainer.progress.summary import Summary
from qwen35_trainer.progress.timeline import timeline_charts

_BODY: Final = Path(__file__).with_suffix(".html")
_STYLE: Final = Path(__file__).with_suffix(".css")


def write_report(
    run_dir: Path,
    run: RunFold,
    resolved_manifest_yaml: str,
    summary: Summary,
    output: Path | None = None,
    write: Callable[[Path, str], None] = write_page,
) -> Path:
    """Write the report to `output`, by default `run_dir`/report.html, and return its path.

    The file is replaced atomically.

    write: function that writes a text to a path.

    Numbers come from the summary, charts from the records that `run` keeps, and responses from samples.jsonl. The
    report omits parts for which the run has no data.
    """
    path = output or run_dir / "report.html"
    write(path, render_report(run_dir.name, run, resolved_manifest_yaml, summary, _samples(run_dir, summary)))
    return path


def _samples(run_dir: Path, summary: Summary) -> str:
    """Return the section with sampled responses.

    If samples.jsonl cannot be read, the section states the reason instead.
    """
    try:
        return sample_section(read_samples(run_dir / SAMPLES_FILE_NAME), summary["maxVersionLag"])
    except (OSError, ValueError) as error:
        return f'<section class="samples"><p>Sampled responses cannot be shown: {escape(str(error))}</p></section>'


def render_report(name: str, run: RunFold, resolved_manifest_yaml: str, summary: Summary, samples: str = "") -> str:
    """Render the report as one HTML page.

    name: the heading if the manifest has no metadata.name. samples: HTML of the sampled responses, placed after the
    charts.
    """
    manifest = yaml.safe_load(resolved_manifest_yaml)
    manifest = manifest if isinstance(manifest, dict) else {}
    name = str(_at(manifest, "metadata", "name") or name)
    drawn = charts(
        run.updates.values,
        run.evaluations.values,
        {int(lag): tokens for lag, tokens in summary["staleness"].items()},
        summary["maxVersionLag"],
        summary["trainTime"],
    )
    drawn += timeline_charts(run.recent_spans, run.coarse_spans.spans)
    body = Template(_BODY.read_text(encoding="utf-8")).substitute(
        name=escape(name),
        facts=escape(_facts(manifest)),
        outcome=summary["outcome"],
        outcome_words=summary["outcome"] or "Not finished",
        origin=escape(_origin(manifest, summary)),
        ending=_ending(summary, run.finish),
        warning=_warning(summary),
        headline="".join(_tile(*tile) for tile in _headline(summary)),
        charts="".join(map(_card, drawn)) or '<p class="empty">No update was recorded.</p>',
        left_out=_left_out(run, summary),
        samples=samples,
        numbers="".join(f"<tr><th>{key}</th><td>{_cell(value)}</td></tr>" for key, value in summary.items()),
        manifest=escape(resolved_manifest_yaml),
    )
    figures = {chart.name: chart.figure for chart in drawn}
    return render_page(f"{name} · qwen35", style=_STYLE.read_text(encoding="utf-8"), body=body, figures=figures)


def _left_out(run: RunFold, summary: Summary) -> str:
    """Return a note that the charts show only some of the updates, or "" if they show all."""
    shown, trained = len(run.updates.values), summary["updates"]
    if shown >= trained:
        return ""
    return f'<p class="note">The charts show {shown:,} of the {trained:,} updates.</p>'


def _headline(summary: Summary) -> list[tuple[str, str, str, str]]:
    """Return the tiles at the top of the report, each as (id, label, number, small text after the number).

    Numbers that this kind of run cannot have are left out.
    """
    held_out = [
        (measure.name, f"Held-out {measure.name}", measure.values, measure.unit)
        for measure in summary_measures(summary)
    ]
    reward = summary["rewardMean"]
    trained = (
        ("loss", "Loss", formatting.number(summary["loss"]), "")
        if reward is None
        else ("reward", "Reward", f"{reward:.3f}", "")
    )
    total, bound = summary["updatesTotal"], summary["maxVersionLag"]
    tiles: list[tuple[str, str, str, str] | None] = [
        *(held_out or [trained]),
        ("updates", "Updates", formatting.count(summary["updates"]), f"of {total:,}" if total else ""),
        (
            "lag",
            "Maximum token lag",
            formatting.count(summary["maxTokenLag"]),
            f"version{'' if summary['maxTokenLag'] == 1 else 's'}, bound {bound}",
        )
        if bound is not None
        else None,
        _idle(summary),
        ("tokensPerSecond", "Generated", formatting.number(summary["tokensPerSecond"]), "tokens/s")
        if summary["tokensPerSecond"] is not None
        else ("tokensPerSecond", "Trained", formatting.number(summary["trainedTokensPerSecond"]), "tokens/s"),
        _groups_left(summary["groupsLeft"]),
        ("seconds", "Time", formatting.duration(summary["seconds"]), ""),
    ]
    return [tile for tile in tiles if tile is not None]


def _idle(summary: Summary) -> tuple[str, str, str, str]:
    rollout, train = summary["rolloutIdle"], summary["trainIdle"]
    if rollout is None:
        return "idle", "Idle, train", formatting.percent(train), ""
    return "idle", "Idle, rollout · train", f"{formatting.percent(rollout)} · {formatting.percent(train)}", ""


def _groups_left(groups: Mapping[str, int]) -> tuple[str, str, str, str] | None:
    if not groups:
        return None
    reasons = ", ".join(f"{formatting.count(count)} {reason}" for reason, count in groups.items())
    return "left", "Groups left untrained", formatting.count(sum(groups.values())), reasons


def _tile(name: str, label: str, number: str, after: str) -> str:
    small = f" <small>{escape(after)}</small>" if after else ""
    return f'<div><dt>{escape(label)}</dt><dd id="{name}">{escape(number)}{small}</dd></div>'


def _card(chart: Chart) -> str:
    key = "".join(f'<li style="--key:var(--{colour[1:]})">{escape(word)}</li>' for colour, word in chart.key)
    return figure_card(chart.name, chart.title, chart.note, size=chart.size, key=f"<ul>{key}</ul>" if key else "")


def _origin(manifest: dict[str, Any], summary: Summary) -> str:
    """Return start time, release and seed as text: "started 2026-01-31 09:30 UTC · qwen35 0.1.0 · seed 1"."""
    started, version, seed = summary["startedAt"], summary["version"], _at(manifest, "spec", "seed")
    facts = [
        f"started {started[:16].replace('T', ' ')} UTC" if started else "",
        f"qwen35 {version}" if version else "",
        "" if seed is None else f"seed {seed}",
    ]
    return " · ".join(fact for fact in facts if fact)


def _ending(summary: Summary, finish: FinishRecord | None) -> str:
    """Return why a run stopped or failed, as HTML; an empty text if the run succeeded or has not ended.

    The last line of the message comes first, then the whole traceback or message.
    """
    message, outcome = summary["message"], summary["outcome"]
    if not message or outcome in (None, "Succeeded"):
        return ""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [message]
    details = (finish.traceback if finish and outcome == "Failed" else "") or (message if len(lines) > 1 else "")
    details_html = f"<pre>{escape(details)}</pre>" if details else ""
    return f'<p class="message {outcome}">{escape(lines[-1])}</p>{details_html}'


def _warning(summary: Summary) -> str:
    """Return a warning about failed reward calls, with the first error, as HTML; an empty text if no call failed.

    The warning matters because a run can succeed although most of its reward calls failed.
    """
    if not summary["rewardErrors"]:
        return ""
    failed = formatting.failures(summary["errorsByReward"], summary["timeoutsByReward"])
    calls = f"{formatting.counted(summary['rewardErrors'], 'call')} failed" + (f": {failed}" if failed else "")
    first = f"<p>The first one: {escape(summary['firstRewardError'])}</p>" if summary["firstRewardError"] else ""
    return f'<section class="warning"><h2>Rewards failed</h2><p>{escape(calls)}</p>{first}</section>'


def _facts(manifest: dict[str, Any]) -> str:
    """Return model, mode, advantage and train engine as text: "Qwen/Qwen3.5-35B-A3B · FullyAsync · GRPO · Megatron"."""
    paths = (("model", "name"), ("mode",), ("algorithm", "advantage"), ("train", "engine"))
    facts = [_at(manifest, "spec", *path) for path in paths]
    return " · ".join(str(fact) for fact in facts if fact)


def _at(value: Any, *keys: str) -> Any:  # noqa: ANN401  (a parsed YAML document)
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _cell(value: object) -> str:
    return formatting.MISSING if value is None else escape(value if isinstance(value, str) else json.dumps(value))
