"""The transformers library, imported without two searches, which take a sixth of a worker's start.

    from qwen35_trainer.light_transformers import transformers

installed packages   transformers lists the files of every installed package, to find the package of each module. It then only
                     looks for a few modules, whose packages have the same names.
model families       transformers reads the sources of all model families to list their classes, and reads them again when
                     the first family is imported, because its cache is smaller than their number.

A version of transformers that searches in another way is imported with its own searches. If transformers is imported
already, nothing happens.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

__all__ = ["transformers"]

SAME_NAME = frozenset({"accelerate", "mistral_common", "torch", "torchvision"})
"""Modules whose packages have the same names."""
SEARCH = "create_import_structure_from_path"
"""The cached function of transformers that reads the sources of model families."""


class _Packages(Mapping[str, list[str]]):
    """Name of a module → names of its packages. They are only searched for modules outside of SAME_NAME."""

    def __getitem__(self, module: str) -> list[str]:
        if module in SAME_NAME:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return [importlib.metadata.distribution(module).name]
        return self._searched[module]

    def __iter__(self) -> Iterator[str]:
        return iter(self._searched)

    def __len__(self) -> int:
        return len(self._searched)

    @functools.cached_property
    def _searched(self) -> Mapping[str, list[str]]:
        return _packages_distributions()


_packages_distributions = importlib.metadata.packages_distributions
_lru_cache = functools.lru_cache


def _caching_every_family(*arguments: Any, **options: Any) -> Callable[..., Any]:  # noqa: ANN401  # as functools.lru_cache
    """Act as `functools.lru_cache`, except that the cache of SEARCH has no limit."""
    if arguments and getattr(arguments[0], "__name__", "") == SEARCH:
        return functools.cache(arguments[0])
    decorated: Callable[..., Any] = _lru_cache(*arguments, **options)
    return decorated


with (
    patch.object(importlib.metadata, "packages_distributions", _Packages),
    patch.object(functools, "lru_cache", _caching_every_family),
):
    import transformers
