"""Builds the charts of the report as plotly figures (plain data) from the records of a run. All functions are pure.

A colour is a name such as "@rollout". The page replaces the name by a value of its style sheet, light or dark. The
rollout pool and the train pool have the same colours in every chart. The name of a curve stands at its end. Charts
without room for names there have a legend (`Chart.key`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from qwen35_trainer.formatting import number
from qwen35_trainer.page import Figure
from qwen35_trainer.progress.curves import Chart, Series, axis_title, curve_figure, layout_of, rounded, value_range
from qwen35_trainer.progress.held_out import measures
from qwen35_trainer.progress.records import TIME_PARTS, EvaluationRecord, UpdateRecord

type Value = Callable[[UpdateRecord], float | None]

_COLOURS: Final = ("@rollout", "@train", "@publish", "@accuracy", "@bad", "@checkpoint", "@warn", "@none")
"""Colours of the curves of a chart with one curve per name, in order of use."""

_TIME_COLOURS: Final = dict(
    zip(TIME_PARTS, ("@train", "@none", "@rollout", "@publish", "@checkpoint", "@accuracy", "@warn"), strict=True)
)
_MIN_LABELLED_SHARE: Final = 0.06  # a smaller part of the bar has no room for its number


def charts(
    updates: Sequence[UpdateRecord],
    evaluations: Sequence[EvaluationRecord],
    staleness: Mapping[int, int],
    bound: int | None,
    train_time: Mapping[str, float] = MappingProxyType({}),
) -> list[Chart]:
    """Return the charts for which the run has numbers, in the order in which the page shows them.

    staleness: lag in versions → number of trained tokens. bound: maximum lag of the manifest; None in SFT. train_time:
    activity of the train pool → share, 0 to 1, of the duration of all updates.
    """
    if not updates and not evaluations:
        return []
    loss = _lines(updates, "Loss", "", "", ("loss", "@train", lambda u: u.loss))
    supervised = all(update.reward_mean is None for update in updates)
    reward = _reward(updates, evaluations)
    drawn = [
        loss if supervised else None,
        *reward[:1],
        _staleness(staleness, bound),
        *reward[1:],
        _lines(
            updates,
            "Response length",
            "tokens per sample",
            "",
            ("maximum", "@rollout", lambda u: u.response_tokens_max),
            ("mean", "@rollout", lambda u: u.response_tokens_mean),
            zero=True,
        ),
        _lines(
            updates,
            "Idle share",
            "of each pool's time",
            ".1~%",
            ("rollout", "@rollout", lambda u: u.rollout_idle),
            ("train", "@train", lambda u: u.train_idle),
            zero=True,
        ),
        _train_time(train_time),
        _lines(
            updates,
            "Generation",
            "tokens per second, all replicas",
            "",
            ("", "@rollout", lambda u: u.tokens_per_second),
            zero=True,
        ),
        _held_out_loss(evaluations),
        None if supervised else loss,
        _lines(updates, "Entropy", "nats per token", "", ("", "@train", lambda u: u.entropy), zero=True),
        _lines(updates, "Gradient norm", "before clipping", "", ("", "@train", lambda u: u.gradient_norm), zero=True),
        _named(updates, "Rewards", "mean score of each, before its weight", lambda u: u.score_by_reward),
        _named(updates, "Sources", "mean reward of each data source", lambda u: u.reward_by_source),
        *_signal(updates),
        *_steps(updates),
    ]
    return [chart for chart in drawn if chart is not None]


def _signal(updates: Sequence[UpdateRecord]) -> list[Chart | None]:
    """Return charts of what weakens the training signal.

    They show truncated responses, groups with equal rewards (zero variance), and failed reward calls.
    """
    without_signal = ("", "@none", lambda u: u.groups_without_signal / u.prompts if u.prompts else None)
    truncated = ("", "@rollout", lambda u: u.truncated_share)
    failed = ("", "@bad", lambda u: u.reward_errors)
    sampled = any(update.reward_mean is not None for update in updates)
    erred = any(update.reward_errors for update in updates)
    return [
        _lines(updates, "Truncated", "share of responses that reached the limit", ".1~%", truncated, zero=True),
        _lines(updates, "Without signal", "share of groups whose rewards are equal", ".1~%", without_signal, zero=True)
        if sampled
        else None,
        _lines(updates, "Reward errors", "calls that failed since the last update", "", failed, zero=True)
        if erred
        else None,
    ]


def _steps(updates: Sequence[UpdateRecord]) -> list[Chart | None]:
    """Return the charts that show how far each update moves the policy: KL, clipped tokens, learning rate."""
    reference, rollout = ("reference", "@train", lambda u: u.kl), ("rollout", "@rollout", lambda u: u.behaviour_kl)
    clipped, rate = ("", "@train", lambda u: u.clip_fraction), ("", "@train", lambda u: u.learning_rate)
    return [
        _lines(
            updates, "KL", "divergence of the trained policy from each of these, nats per token", "", reference, rollout
        ),
        _lines(updates, "Clipped", "share of trained tokens", ".1~%", clipped, zero=True),
        _lines(updates, "Learning rate", "", "", rate, zero=True),
    ]


def _named(
    updates: Sequence[UpdateRecord], title: str, note: str, values: Callable[[UpdateRecord], Mapping[str, float]]
) -> Chart | None:
    """Return a chart with one curve per name, for at most as many names as there are colours.

    The caption lists the names. Returns None if there are fewer than two names, because a single curve would
    repeat the reward.
    """
    names = list(dict.fromkeys(name for update in updates for name in values(update)))
    if len(names) < 2:
        return None
    colours = dict(zip(names, _COLOURS, strict=False))
    series = [
        Series(
            "", colour, [update.update for update in updates], [rounded(values(update).get(name)) for update in updates]
        )
        for name, colour in colours.items()
    ]
    figure = curve_figure(series, value_range([value for line in series for value in line.y], zero=False), "")
    note += "" if len(names) == len(colours) else f"; the first {len(colours)} of {len(names)}"
    return Chart(title.lower(), title, note, figure, key=tuple((colour, name) for name, colour in colours.items()))


def _reward(updates: Sequence[UpdateRecord], evaluations: Sequence[EvaluationRecord]) -> list[Chart]:
    """Return the charts of reward, held-out reward and held-out accuracy.

    If all rewards are between 0 and 1, they share one chart with the accuracy. Otherwise accuracy has a separate chart.
    """
    measured = [(evaluation.accuracy, evaluation.reward_mean) for evaluation in evaluations]
    names = {measure.name for measure in measures(measured)}
    held_out = _held_out("held out", "@publish", evaluations, lambda e: e.reward_mean) if "reward" in names else None
    accuracy = _held_out("accuracy", "@accuracy", evaluations, lambda e: e.accuracy) if "accuracy" in names else None
    rewards = [
        series for series in (_series("reward", "@rollout", updates, lambda u: u.reward_mean), held_out) if series
    ]
    shares = all(value is None or 0 <= value <= 1 for series in rewards for value in series.y)
    together = [*rewards, accuracy] if accuracy and shares else rewards
    drawn = []
    if rewards:
        note = "mean over each update's samples" + ("; held out: prompts that are never trained" if measured else "")
        title = "Reward and held-out accuracy" if accuracy in together else "Reward"
        values = [value for series in together for value in series.y]
        if shares:
            drawn.append(_share("reward", title, note, together))
        else:
            single = together if len(together) > 1 else [replace(together[0], name="")]
            drawn.append(
                Chart("reward", title, note, curve_figure(single, value_range(values, zero=False), ""), "wide")
            )
    if accuracy and accuracy not in together:
        drawn.append(_share("accuracy", "Held-out accuracy", "on prompts that are never trained", [accuracy]))
    return drawn


def _held_out(
    name: str,
    colour: str,
    evaluations: Sequence[EvaluationRecord],
    value: Callable[[EvaluationRecord], float | None],
) -> Series:
    points = [rounded(value(evaluation)) for evaluation in evaluations]
    return Series(name, colour, [evaluation.update for evaluation in evaluations], points, markers=True)


def _held_out_loss(evaluations: Sequence[EvaluationRecord]) -> Chart | None:
    measured = [evaluation for evaluation in evaluations if evaluation.loss is not None]
    if not measured:
        return None
    points = [rounded(evaluation.loss) for evaluation in measured]
    series = Series("", "@accuracy", [evaluation.update for evaluation in measured], points, markers=True)
    figure = curve_figure([series], value_range(points, zero=False), "")
    return Chart("held-out-loss", "Held-out loss", "nats per token, on examples that are never trained", figure)


def _share(name: str, title: str, note: str, series: Sequence[Series]) -> Chart:
    figure = curve_figure(series if len(series) > 1 else [replace(series[0], name="")], (0.0, 1.02), "")
    figure["layout"]["yaxis"]["dtick"] = 0.25
    return Chart(name, title, note, figure, "wide" if name == "reward" else "small")


def _staleness(tokens: Mapping[int, int], bound: int | None) -> Chart | None:
    if not tokens:
        return None
    total = sum(tokens.values())
    last = max(*tokens, bound or 0, 1)
    lags = list(range(last + 1))
    shares = [tokens.get(lag, 0) / total for lag in lags]
    top = max(shares) * 1.22
    data: list[Figure] = [
        {
            "type": "bar",
            "x": lags,
            "y": shares,
            "marker": {"color": "@rollout"},
            "width": 0.72,
            "text": [f"{share:.0%}" if share >= 0.005 else "<1%" if share else "" for share in shares],
            "textposition": "outside",
            "textfont": {"color": "@ink", "size": 12},
            "cliponaxis": False,
            "customdata": [tokens.get(lag, 0) for lag in lags],
            "hovertemplate": "lag %{x}: %{customdata:,} tokens<extra></extra>",
        }
    ]
    layout = layout_of((0.0, top), ".0%", right=16)
    layout["xaxis"] |= {
        "title": axis_title("lag in versions"),
        "range": [-0.6, last + 0.85],
        "dtick": max(1, last // 8),
    }
    layout["xaxis"] |= {"showgrid": False}
    if bound is not None:
        layout["shapes"] = [_vertical(bound + 0.5)]
        layout["annotations"] = [
            {
                "x": bound + 0.5,
                "y": 1,
                "yref": "paper",
                "text": f"bound {bound}",
                "showarrow": False,
                "xanchor": "right",
                "yanchor": "top",
                "xshift": -6,
                "font": {"color": "@bound", "size": 12},
            }
        ]
    mean = sum(lag * count for lag, count in tokens.items()) / total
    note = f"share of trained tokens by lag; mean {number(mean)} versions"
    return Chart("staleness", "Staleness", note, {"data": data, "layout": layout})


def _train_time(shares: Mapping[str, float]) -> Chart | None:
    """Return a chart with one bar: the share of time that the train pool spent on, or waited for, each activity.

    shares: activity → share of the duration of all updates. Returns None if `shares` is empty.
    """
    if not shares:
        return None
    order = [part for part in TIME_PARTS if part in shares]
    data: list[Figure] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [""],
            "x": [shares[part]],
            "name": part,
            "marker": {"color": colour, "line": {"color": "@card", "width": 1}},
            "text": [f"{shares[part]:.0%}" if shares[part] >= _MIN_LABELLED_SHARE else ""],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "hovertemplate": f"{part}: {shares[part]:.1%}<extra></extra>",
        }
        for part, colour in ((part, _TIME_COLOURS[part]) for part in order)
    ]
    layout = layout_of((-0.5, 0.5), "", right=16)
    layout["barmode"] = "stack"
    layout["xaxis"] |= {"range": [0, max(1.0, sum(shares.values()))], "tickformat": ".0%"}
    layout["yaxis"] |= {"showticklabels": False, "showgrid": False, "fixedrange": True}
    key = tuple((_TIME_COLOURS[part], f"{part} {shares[part]:.1%}") for part in order)
    return Chart(
        "train-time", "Train pool", "shares of the time of all updates", {"data": data, "layout": layout}, key=key
    )


def _vertical(x: float) -> Figure:
    line = {"color": "@bound", "width": 1.5, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _lines(
    updates: Sequence[UpdateRecord],
    title: str,
    note: str,
    form: str,
    *lines: tuple[str, str, Value],
    zero: bool = False,
) -> Chart | None:
    """Return a chart of curves over the updates, or None if no curve has values.

    form: plotly's format of the numbers. lines: (name, colour, value) of each curve. If two curves have the same
    colour, the first curve is drawn thin. zero: whether the vertical axis begins at 0.
    """
    colours = [colour for _, colour, _ in lines]
    same_colour = len(set(colours)) < len(colours)
    candidates = [_series(name, colour, updates, value) for name, colour, value in lines]
    series = [replace(line, thin=same_colour and place == 0) for place, line in enumerate(candidates) if line]
    if not series:
        return None
    if len(series) == 1 and len(lines) == 1:
        series = [replace(series[0], name="")]
    limits = value_range([value for line in series for value in line.y], zero=zero)
    return Chart(title.lower().replace(" ", "-"), title, note, curve_figure(series, limits, form))


def _series(name: str, colour: str, updates: Sequence[UpdateRecord], value: Value) -> Series | None:
    points = [rounded(value(update)) for update in updates]
    if all(point is None for point in points):
        return None
    return Series(name, colour, [update.update for update in updates], points)
