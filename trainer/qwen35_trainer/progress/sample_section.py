"""The section of the report that shows sampled responses. Their texts are the model's and the data's: not to be trusted."""

from collections.abc import Sequence
from html import escape
from typing import Final

from qwen35_trainer.progress.formatting import NONE, by_name, counted
from qwen35_trainer.progress.samples import Kind, Moment, Piece, Sample

_TITLES: Final[dict[Kind, tuple[str, str]]] = {
    "held out": ("Held-out responses", "to the same prompts at each evaluation, the latest first"),
    "trained": ("Trained responses", "of one group of an update, the best and the worst; the latest update first"),
}
_DARKEST: Final = 60
"""Per cent of the colour behind tokens of the largest lag."""
_VISIBLE: Final = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
"""Control characters, which a page may not hold, and the signs that stand for them."""


def section(moments: Sequence[Moment], max_version_lag: int | None) -> str:
    """HTML; empty without moments. max_version_lag: the bound of the manifest, whose tokens get the darkest colour."""
    lags = [lag for moment in moments for each in moment.samples for lag, _ in each.response if lag is not None]
    darkest = max([*lags, max_version_lag or 0, 1])
    found = []
    for kind, (title, note) in _TITLES.items():
        course = [moment for moment in moments if moment.kind == kind and moment.samples]
        if course:
            newest, *others = reversed(course)
            shown = _moment(newest, darkest, opened=True) + _earlier([_moment(each, darkest) for each in others])
            key = _key(max(lags, default=0), darkest) if kind == "trained" else ""
            caption = f"<figcaption><h2>{title}</h2><span>{note}</span>{key}</figcaption>"
            found.append(f'<section class="samples">{caption}{shown}</section>')
    return "".join(found)


def _earlier(moments: Sequence[str]) -> str:
    if not moments:
        return ""
    return f'<details class="moment"><summary>{len(moments)} earlier</summary>{"".join(moments)}</details>'


def _moment(moment: Moment, darkest: int, *, opened: bool = False) -> str:
    rewards = ", ".join(_reward(sample) for sample in moment.samples)
    after = "after update" if moment.kind == "held out" else "update"
    samples = "".join(_sample(sample, darkest) for sample in moment.samples)
    return (
        f'<details class="moment"{" open" if opened else ""}><summary>{after} {moment.update:,} '
        f"<small>{'reward' if len(moment.samples) == 1 else 'rewards'} {rewards}</small></summary>{samples}</details>"
    )


def _sample(sample: Sample, darkest: int) -> str:
    scores = f" ({by_name(sample.scores)})" if len(sample.scores) > 1 else ""
    facts = [sample.prompt_id, f"reward {_reward(sample)}{scores}", counted(sample.tokens, "token")]
    facts += ["cut at the limit"] if sample.truncated else []
    facts += [f"{name} failed: {error}" for name, error in sample.errors.items()]
    answer = "" if sample.answer is None else f"<dt>answer</dt>{_text(escape(_visible(sample.answer)))}"
    response = "".join(_piece(piece, darkest) for piece in sample.response) or "<i>empty</i>"
    return (
        f"<article><p>{escape(_visible(' · '.join(facts)))}</p><dl><dt>prompt</dt>{_text(escape(_visible(sample.prompt)))}"
        f"<dt>response</dt>{_text(response)}{answer}</dl></article>"
    )


def _text(html: str) -> str:
    """Whatever the direction of its writing, it stays within its element."""
    return f'<dd class="text" dir="auto">{html}</dd>'


def _piece(piece: Piece, darkest: int) -> str:
    lag, text = piece
    if lag is None:
        return f"<i>{escape(text)}</i>"
    return f'<span style="--lag:{_share(lag, darkest)}%" title="lag {lag}">{escape(_visible(text))}</span>'


def _key(largest: int, darkest: int) -> str:
    """What the colours behind tokens mean."""
    shown = range(min(largest, 8) + 1)
    colours = "".join(f'<li style="--lag:{_share(lag, darkest)}%">{lag}</li>' for lag in shown)
    return f"<ul><li>lag of the tokens, in versions:</li>{colours}</ul>"


def _share(lag: int, darkest: int) -> int:
    return min(_DARKEST, max(0, lag * _DARKEST // darkest))


def _reward(sample: Sample) -> str:
    return NONE if sample.reward is None else f"{sample.reward:.3f}"


def _visible(text: str) -> str:
    return text.replace("\r\n", "\n").translate(_VISIBLE)
