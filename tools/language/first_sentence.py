"""Checks that the first sentence of a public docstring stands alone, as an IDE shows it in a hover.

what                          accepted
function, method              a sentence with a verb: an imperative first ("Return …"), a finite verb ("The loop ends …"),
                              an infinitive ("Seconds to prefill …"), or "Whether …"
context manager               "Context manager:" and then the same
class, module, property       the same, or a noun phrase of at least three words ("Metadata of one checkpoint.")

Neither may start with a preposition, a conjunction or a pronoun, which would continue the name ("Of the group.").
Verbs come from `verbs.txt`; "does", "is" and the like always count. A word that is both noun and plural ("runs") counts as a verb:
the check would rather miss a fragment than reject a sentence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

MIN_WORDS = 3
CONTINUATION = re.compile(
    "of|for|from|in|with|by|at|on|to|into|so|that|which|and|but|than|until|before|after|as|when|where|while|under|over|beyond|"
    "without|within|it|its|they|them|those|these|this|none|nothing|what|who|whose|how|why|because|since|among|around|about|also",
    re.IGNORECASE,
)
AUXILIARY = re.compile(
    "is|are|was|were|ha[sd]|have|does|do|did|can|cannot|could|may|might|must|will|would|should|whether"
)
BASE_FORMS = frozenset(Path(__file__).with_name("verbs.txt").read_text(encoding="utf-8").split())

type Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _third_person(verb: str) -> str:
    if re.search(r"(?:s|x|z|ch|sh|o)$", verb):
        return verb + "es"
    return verb[:-1] + "ies" if re.search(r"[^aeiou]y$", verb) else verb + "s"


FINITE_FORMS = {_third_person(verb) for verb in BASE_FORMS}


def fragments_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and a message for every public docstring whose first sentence does not stand alone."""
    for node in _public(tree):
        docstring = ast.get_docstring(node)
        if docstring:
            problem = problem_of(docstring, noun_phrase_allowed=_is_thing(node))
            if problem:
                yield node.body[0].lineno, problem


def problem_of(docstring: str, *, noun_phrase_allowed: bool) -> str | None:
    """Return what is wrong with the first sentence of `docstring`, or None."""
    sentence = re.split(r"(?<=[.?!])\s|\n\s*\n", docstring.strip().removeprefix("Context manager: "), maxsplit=1)[0]
    words = re.findall(r"[A-Za-z][\w'-]*|`[^`]*`", sentence)
    shown = f'"{" ".join(sentence.split())[:60]}"'
    if len(words) < MIN_WORDS:
        return f"{shown} is a fragment: write a sentence of at least {MIN_WORDS} words"
    if CONTINUATION.fullmatch(words[0]):
        return f'{shown} starts with "{words[0]}", which continues the name: write a sentence that stands alone'
    if noun_phrase_allowed or _has_verb([word.lower() for word in words]):
        return None
    return f'{shown} has no verb: start with one, such as "Return", or add the verb to tools/language/verbs.txt'


def _has_verb(words: list[str]) -> bool:
    finite = any(word in FINITE_FORMS or AUXILIARY.fullmatch(word) for word in words)
    infinitive = any(word in BASE_FORMS for before, word in pairwise(words) if before in {"to", "and", "or"})
    return words[0] in BASE_FORMS or finite or infinitive


def _public(node: Documented) -> Iterator[Documented]:
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield from _public(child)


def _is_thing(node: Documented) -> bool:
    if isinstance(node, ast.Module | ast.ClassDef):
        return True
    decorators = {name for decorator in node.decorator_list for name in ast.unparse(decorator).split(".")}
    return bool(decorators & {"property", "cached_property", "fixture"})
