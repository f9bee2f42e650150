"""From a plain document to the checked spec: field problems and cross-field problems, all at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qwen35_trainer.spec import fields
from qwen35_trainer.spec.checks import check
from qwen35_trainer.spec.errors import explain
from qwen35_trainer.spec.manifest import API_VERSION, KIND, Manifest
from qwen35_trainer.spec.problems import ManifestError, Problem
from qwen35_trainer.spec.training import TrainingSpec


def parse_spec(document: object) -> tuple[TrainingSpec | None, list[Problem]]:
    """The spec of a document and every problem in it; the spec is None when a field could not be read.

    Cross-field checks run on the sections that parsed, so that one typo does not hide what else is wrong.
    """
    try:
        spec = TrainingSpec.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        failed = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
        problems = explain(error, document, TrainingSpec, ("spec",))
        if isinstance(document, Mapping):
            problems += check(_parsed_part(document, failed), without=failed)
        return None, problems
    return spec, check(spec)


def parse_manifest(document: object, file: Path | None = None) -> Manifest:
    """The manifest of a document. Raises ManifestError with every problem found."""
    if wrong := _wrong_kind(document):
        raise ManifestError(file, wrong)
    assert isinstance(document, Mapping)
    try:
        manifest = Manifest.model_validate(document, by_alias=True, by_name=False)
        problems = check(manifest.spec)
    except ValidationError as error:
        envelope = [detail for detail in error.errors() if detail["loc"][:1] != ("spec",) or len(detail["loc"]) == 1]
        problems = explain(envelope, document, Manifest, ())
        if isinstance(document.get("spec"), Mapping):
            problems += parse_spec(document["spec"])[1]
        raise ManifestError(file, problems) from None
    if problems:
        raise ManifestError(file, problems)
    return manifest


def _parsed_part(document: Mapping[str, Any], failed: set[str]) -> TrainingSpec:
    """The spec with the failed sections left at their defaults, or empty where there is none: not to be read."""
    known = fields.fields(TrainingSpec)
    good = {key: value for key, value in document.items() if key in known and key not in failed}
    for key in failed & known.keys():
        model = fields.section(known[key].annotation)
        if known[key].is_required() and model is not None:
            good[key] = model.model_construct()
    return TrainingSpec.model_validate(good, by_alias=True, by_name=False)


def _wrong_kind(document: object) -> list[Problem]:
    """A document that is no Qwen35Training at all gets this one problem, not one for each of its fields."""
    if not isinstance(document, Mapping):
        return [Problem("", "this is not a mapping.", f"Start with apiVersion: {API_VERSION} and kind: {KIND}.")]
    wrong = []
    for key, right in (("apiVersion", API_VERSION), ("kind", KIND)):
        found = document.get(key)
        if found is None:
            wrong.append(Problem(key, "is required.", f"Add {key}: {right}."))
        elif found != right:
            wrong.append(Problem(key, f"{found} is not {right}.", f"Write {key}: {right}, or give another file."))
    return wrong
