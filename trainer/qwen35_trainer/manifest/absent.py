"""Settings that other trainers and engines have and this project does not, so that an error about one can say what to do instead."""

from collections.abc import Sequence
from typing import Final

_STOP_TOKENS: Final = (
    "No field sets stop tokens. A response ends at the tokenizer's end token, and at the special tokens that eos_token_id "
    "names in generation_config.json of model.source.path: add the token there."
)
_STOP_STRINGS: Final = (
    "No field sets stop strings, because a response ends at a token. If one special token of the tokenizer "
    "is the string, add it to eos_token_id in generation_config.json of model.source.path. Otherwise let the reward read "
    "the response up to the string, such as with rewards[].extract, and limit the response by data.maxResponseTokens."
)
_ENDS: Final = "A response always ends at the end token. Its maximum length is data.maxResponseTokens."
_SAMPLING: Final = "Sampling has the fields temperature, topP, topK and minP of rollout. There are none for stop strings and penalties."

_SETTINGS: Final = {
    "stop": _STOP_STRINGS,
    "stopstring": _STOP_STRINGS,
    "stopstrings": _STOP_STRINGS,
    "stopsequence": _STOP_STRINGS,
    "stopsequences": _STOP_STRINGS,
    "stopwords": _STOP_STRINGS,
    "includestopstrinoutput": _STOP_STRINGS,
    "stoptoken": _STOP_TOKENS,
    "stoptokens": _STOP_TOKENS,
    "stoptokenid": _STOP_TOKENS,
    "stoptokenids": _STOP_TOKENS,
    "eostokenid": _STOP_TOKENS,
    "ignoreeos": _ENDS,
    "generationkwargs": _SAMPLING,
    "samplingparams": _SAMPLING,
}
"""Name of a setting, in lower case and without underscores → what this project has in its place."""
_SECTIONS: Final = frozenset({"rollout", "evaluation"})
"""Sections of the spec in which these names mean the settings above."""


def answer(path: Sequence[str]) -> str | None:
    """Return what to do in place of a setting that this project does not have, as text; None for any other name.

    path: the names from the spec down to the setting.
    """
    if path[0] not in _SECTIONS:
        return None
    return _SETTINGS.get(path[-1].lower().replace("_", ""))
