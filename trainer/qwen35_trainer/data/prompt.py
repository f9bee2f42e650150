"""One prompt, as every later stage sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

type Message = Mapping[str, str]


@dataclass(frozen=True)
class Prompt:
    """What the model is asked, and what a reward needs to judge the response.

    id: `<source>/<row>`, the same in every run. text: a plain text, or chat messages with `role` and `content`.
    answer: the reference answer, where the source has one. metadata: the row's other fields (files), or `gym` and
    `entry` (gym); plain values only, so that it can be sent between processes.
    """

    id: str
    source: str
    text: str | tuple[Message, ...]
    answer: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
