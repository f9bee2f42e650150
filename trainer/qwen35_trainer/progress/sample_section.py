"""Renders the section of the report with sampled responses.

Texts of responses and prompts come from the model and the data, and are not trusted: all of them are escaped.
"""

from collections.abc import Sequence
from html import escape
from typing import Final

from qwen35_trainer.formatting import MISSING, by_name, counted
from qwen35_trainer.progress.sample_file import Moment, MomentKind, Sample, TextPiece

_TITLES: Final[dict[MomentKind, tuple[str, str]]] = {
    "held out": ("Held-out responses", "to the same prompts at each evaluation, latest first"),
    "trained": ("Trained responses", "the best and the worst of one group per update, latest update first"),
}
_MAX_COLOUR_PERCENT: Final = 60
"""Strength of the colour behind tokens of the maximum lag, in percent. Tokens with less lag have a weaker colour."""
_VISIBLE: Final = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
"""Control characters, which HTML does not allow, mapped to visible symbols."""


def sample_section(moments: Sequence[Moment], max_version_lag: int | None) -> str:
    """Render the sampled responses as HTML; "" if there are none.

    max_version_lag: the manifest's maximum lag; None in SFT. The darkest colour stands for this lag, or for the maximum
    lag in the samples if that is larger.
    """
    lags = [lag for moment in moments for sample in moment.samples for lag, _ in sample.response if lag is not None]
    max_lag = max([*lags, max_version_lag or 0, 1])
    sections = []
    for kind, (title, note) in _TITLES.items():
        of_kind = [moment for moment in moments if moment.kind == kind and moment.samples]
        if of_kind:
            newest, *others = reversed(of_kind)
            body = _moment(newest, max_lag, opened=True) + _earlier([_moment(moment, max_lag) for moment in others])
            key = _key(max(lags, default=0), max_lag) if kind == "trained" else ""
            caption = f"<figcaption><h2>{title}</h2><span>{note}</span>{key}</figcaption>"
            sections.append(f'<section class="samples">{caption}{body}</section>')
    return "".join(sections)


def _earlier(moments: Sequence[str]) -> str:
    if not moments:
        return ""
    return f'<details class="moment"><summary>{len(moments)} earlier</summary>{"".join(moments)}</details>'


def _moment(moment: Moment, max_lag: int, *, opened: bool = False) -> str:
    rewards = ", ".join(_reward(sample) for sample in moment.samples)
    after = "after update" if moment.kind == "held out" else "update"
    samples = "".join(_sample(sample, max_lag) for sample in moment.samples)
    return (
        f'<details class="moment"{" open" if opened else ""}><summary>{after} {moment.update:,} '
        f"<small>{'reward' if len(moment.samples) == 1 else 'rewards'} {rewards}</small></summary>{samples}</details>"
    )


def _sample(sample: Sample, max_lag: int) -> str:
    scores = f" ({by_name(sample.scores)})" if len(sample.scores) > 1 else ""
    facts = [sample.prompt_id, f"reward {_reward(sample)}{scores}", counted(sample.tokens, "token")]
    facts += ["truncated at the limit"] if sample.truncated else []
    facts += [f"{name} failed: {error}" for name, error in sample.errors.items()]
    answer = "" if sample.answer is None else f"<dt>answer</dt>{_text(escape(_visible(sample.answer)))}"
    response = "".join(_piece(piece, max_lag) for piece in sample.response) or "<i>empty</i>"
    return (
        f"<article><p>{escape(_visible(' · '.join(facts)))}</p><dl><dt>prompt</dt>{_text(escape(_visible(sample.prompt)))}"
        f"<dt>response</dt>{_text(response)}{answer}</dl></article>"
    )


def _text(html: str) -> str:
    """Wrap text so that right-to-left writing in it does not affect the rest of the page."""
    return f'<dd class="text" dir="auto">{html}</dd>'


def _piece(piece: TextPiece, max_lag: int) -> str:
    lag, text = piece
    if lag is None:
        return f"<i>{escape(text)}</i>"
    return f'<span style="--lag:{_colour_percent(lag, max_lag)}%" title="lag {lag}">{escape(_visible(text))}</span>'


def _key(largest: int, max_lag: int) -> str:
    """Return the legend of the colours behind tokens, as HTML. largest: maximum lag in the samples."""
    lags = range(min(largest, 8) + 1)
    colours = "".join(f'<li style="--lag:{_colour_percent(lag, max_lag)}%">{lag}</li>' for lag in lags)
    return f"<ul><li>lag of the tokens, in versions:</li>{colours}</ul>"


def _colour_percent(lag: int, max_lag: int) -> int:
    return min(_MAX_COLOUR_PERCENT, max(0, lag * _MAX_COLOUR_PERCENT // max_lag))


def _reward(sample: Sample) -> str:
    return MISSING if sample.reward is None else f"{sample.reward:.3f}"


def _visible(text: str) -> str:
    return text.replace("\r\n", "\n").translate(_VISIBLE)
