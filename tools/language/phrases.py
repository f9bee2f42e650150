"""Phrases that the project's English avoids, each with what to write instead.

Patterns match whole words, in any case, across line ends. What is standard English passes: at least, by hand, there is no,
least common multiple, all the same length, sets aside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.language.texts import Text

PHRASES: dict[str, str] = {
    r"(?<!there )(?:is|are|was|were) no(?! (?:longer|more|less|later|earlier|sooner)\b)": "is not a",
    r"none was at hand|at hand": "available",
    r"(?<!by )(?<!left )(?<!right )(?<!left-)(?<!right-)(?<!other )hand(?:s|ed|ing)?(?!-)": "pass, give; worker",
    r"anew": "again",
    r"at once": "immediately, or together",
    r"beside": "next to, while, or in addition to",
    r"greatest(?! common)": "maximum",
    r"(?<!at )least(?! (?:significant|squares|common|privileges?|recently|loaded)\b)": "minimum",
    r"fewest(?= that)|the fewest": "the smallest number of, or minimum",
    r"longest (?:wait|time|pause|interval|delay|name|line)": "maximum",
    r"for want of": "because there is no, or because it ran out of",
    r"(?:is|are|was|were) to (?:be|have)": "should be, should have, or a finite verb",
    r"said|told|tells": "reports, states, lists, or the noun that is meant",
    r"asks": "requests, or the field that is set",
    r"news": "event, or change",
    r"of late": "recently",
    r"so many|so manieth": "the number itself, such as `count` items",
    r"(?:the )?other way (?:a)?round": "the reverse",
    r"(?:go|goes|went|going|gone) on(?! to)": "continue",
    r"whoever|who cannot": "a noun: the process that, users who",
    r"as (?:it|they) should(?: be)?": "what is expected",
    r"(?<!set )(?<!sets )(?<!put )aside": "apart from, except",
    r"(?<!are )(?<!is )(?<!were )(?<!not )all the same(?! \w+s?\b)": "still, nevertheless",
    r"(?:come|comes|came|coming) of": "results from",
    r"becomes? of": "happens to",
    r"(?:has|have|had) it that": "states that",
    r"by (?:itself|themselves)": "automatically, or on its own",
    r"\w+'s to (?:set|say|decide|give|take|keep|make|choose|end|write)": "is set by, or sets",
    r"(?:it|this|that|which) is (?:theirs|its own|no one's|nobody's)": "belongs to",
    r"what no|of which none": "a finite clause with its subject first",
}
# Structures of a sentence rather than words in it.
SENTENCE = r"(?:\A|(?<=[.!?:;])\s+|(?<=\n)\s*)"
INVERTED = (
    "Sought|Allowed|Meant|Kept|Left out|Wanted|Asked|Counted|Exercised|Measured|Checked|Tested|Needed|Compared|Shown"
)
STRUCTURES: dict[re.Pattern[str], str] = {
    re.compile(rf"{SENTENCE}(?:Not )?(?:{INVERTED}) (?:is|are|was|were)\b", re.IGNORECASE): "the subject first",
    re.compile(rf"{SENTENCE}Who (?!is\b|are\b)[a-z]+[^?|]*\.(?:\s|\Z)"): "a noun: the process that, users who",
    re.compile(r"\b\w+'s own(?=[.,;:)]|\Z)|\bits own word\b"): "the noun that is owned",
}

WORDS = {
    re.compile(rf"\b(?:{phrase})\b".replace(" ", r"\s"), re.IGNORECASE): advice for phrase, advice in PHRASES.items()
}
RULES = WORDS | STRUCTURES
# Most passages match nothing: one pattern finds that out in a third of the time.
ANY_WORD = re.compile("|".join(pattern.pattern for pattern in WORDS), re.IGNORECASE)


def phrases_in(text: Text) -> Iterator[tuple[int, str]]:
    """Yield the line and a message for every phrase in `text` that plain English avoids."""
    for pattern, advice in (RULES if ANY_WORD.search(text.content) else STRUCTURES).items():
        for match in pattern.finditer(text.content):
            phrase = " ".join(match.group().split())[:60]
            start = match.start() + len(match.group()) - len(match.group().lstrip())
            yield text.line + text.content.count("\n", 0, start), f'"{phrase}": write {advice}'
