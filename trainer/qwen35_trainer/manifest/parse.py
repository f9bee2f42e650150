"""Parses plain data into a checked spec. It reports problems of single fields and of checks across fields together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qwen35_trainer.manifest import fields
from qwen35_trainer.manifest.checks import Check, check
from qwen35_trainer.manifest.errors import explain
from qwen35_trainer.manifest.problems import ManifestError, Problem
from qwen35_trainer.manifest.resource import API_VERSION, KIND, Manifest
from qwen35_trainer.manifest.training import TrainingSpec


def parse_spec(
    document: object, *, new: bool = True, on_machine: Check | None = None
) -> tuple[TrainingSpec | None, list[Problem]]:
    """Parse and check a spec. Returns (spec or None, problems). The spec is None if a field is invalid.

    Checks across fields run on the sections that are valid, so that one typo does not hide other problems.
    new: whether the spec is of a new training. False skips `checks.NEW_TRAINING_CHECKS`, because an earlier
    release may have accepted the spec. on_machine: a further check, of what is installed on this machine. It runs if the
    fields of all sections are valid.
    """
    try:
        spec = TrainingSpec.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        failed = {str(detail["loc"][0]) for detail in error.errors() if detail["loc"]}
        problems = explain(error, document, TrainingSpec, ("spec",))
        if isinstance(document, Mapping):
            problems += check(_parsed_part(document, failed), without=failed, new=new)
        return None, problems
    return spec, [*check(spec, new=new), *(on_machine(spec) if on_machine else ())]


def parse_stored_spec(document: object) -> tuple[TrainingSpec | None, list[Problem], tuple[str, ...]]:
    """Parse and check the spec of a training that the API server has stored. Returns (spec or None, problems, unknown).

    unknown: paths of the fields that this release does not know, such as "spec.train.router.replay". The API server
    stores only fields of the installed CRD, so they are fields of a later release, which may have nothing but their
    defaults. The spec is read without them if nothing else is wrong with it; otherwise they are among the problems.
    """
    unknown: tuple[str, ...] = ()
    try:
        spec = TrainingSpec.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        try:
            spec = TrainingSpec.model_validate(document, by_alias=True, by_name=False, extra="ignore")
        except ValidationError:
            return *parse_spec(document, new=False), ()
        extra = [detail for detail in error.errors() if detail["type"] == "extra_forbidden"]
        unknown = tuple(problem.path for problem in explain(extra, document, TrainingSpec, ("spec",)))
    return spec, check(spec, new=False), unknown


def parse_manifest(
    document: object, file: Path | None = None, *, new: bool = True, on_machine: Check | None = None
) -> Manifest:
    """Parse and check a manifest. Raises ManifestError with every problem found.

    file: path of the manifest, for the error. new: whether the manifest is of a new training. False skips
    `checks.NEW_TRAINING_CHECKS`, because an earlier release may have accepted the manifest. on_machine: a further check, as
    in `parse_spec`.
    """
    if wrong := _wrong_kind(document):
        raise ManifestError(file, wrong)
    assert isinstance(document, Mapping)
    try:
        manifest = Manifest.model_validate(document, by_alias=True, by_name=False)
        problems = [*check(manifest.spec, new=new), *(on_machine(manifest.spec) if on_machine else ())]
    except ValidationError as error:
        envelope = [detail for detail in error.errors() if detail["loc"][:1] != ("spec",) or len(detail["loc"]) == 1]
        problems = explain(envelope, document, Manifest, ())
        if isinstance(document.get("spec"), Mapping):
            problems += parse_spec(document["spec"], new=new, on_machine=on_machine)[1]
        raise ManifestError(file, problems) from None
    if problems:
        raise ManifestError(file, problems)
    return manifest


def _parsed_part(document: Mapping[str, Any], failed: set[str]) -> TrainingSpec:
    """Return a spec of the valid sections, for the checks that read only these.

    failed: names of the invalid sections. Their contents in the result have no meaning: an optional section has its default,
    and a required section only those of its fields that have a default.
    """
    spec_fields = fields.fields(TrainingSpec)
    valid = {key: value for key, value in document.items() if key in spec_fields and key not in failed}
    for key in failed & spec_fields.keys():
        model = fields.section(spec_fields[key].annotation)
        if spec_fields[key].is_required() and model is not None:
            valid[key] = model.model_construct()
    return TrainingSpec.model_validate(valid, by_alias=True, by_name=False)


def _wrong_kind(document: object) -> list[Problem]:
    """Return the single problem of a document that is not a Qwen35Training, which replaces the problems of its fields."""
    if not isinstance(document, Mapping):
        return [
            Problem(
                "", "expected a mapping at the top level.", f"Start with apiVersion: {API_VERSION} and kind: {KIND}."
            )
        ]
    wrong = []
    for key, right in (("apiVersion", API_VERSION), ("kind", KIND)):
        written = document.get(key)
        if written is None:
            wrong.append(Problem(key, "is required.", f"Add {key}: {right}."))
        elif written != right:
            wrong.append(Problem(key, f"{written} is not {right}.", f"Write {key}: {right}, or give another file."))
    return wrong
