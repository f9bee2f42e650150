"""Functions that find fields and their types in the pydantic models, by the names that a manifest uses."""

from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

type Segment = str | int


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return a model's fields by the names that a manifest uses."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def bare(annotation: object) -> object:
    """Return a type annotation without its constraints (`Annotated`), and without None
    if exactly one other type remains.

    `int | None` becomes int. A union of two or more other types is returned unchanged, including None.
    """
    if get_origin(annotation) is Annotated:
        return bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        options = [option for option in get_args(annotation) if option is not NoneType]
        return bare(options[0]) if len(options) == 1 else annotation
    return annotation


def section(annotation: object) -> type[BaseModel] | None:
    """Return the pydantic model that a type annotation stands for, or None if it stands for another type."""
    kind = bare(annotation)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def item(annotation: object) -> object | None:
    """Return the type of the items if the annotation is a list (a tuple in the models); None for any other annotation."""
    kind = bare(annotation)
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def is_map(annotation: object) -> bool:
    """Return whether a type annotation is a map with arbitrary keys."""
    return get_origin(bare(annotation)) is dict


def at(annotation: object, path: Sequence[Segment]) -> object | None:
    """Return the type annotation of the field at `path`; None if there is no such field.

    annotation: the type from which the path starts, such as the class of the manifest.
    """
    for segment in path:
        model = section(annotation)
        if model is not None and segment in fields(model):
            annotation = fields(model)[str(segment)].annotation
        elif isinstance(segment, int) and item(annotation) is not None:
            annotation = item(annotation)
        elif is_map(annotation):
            annotation = get_args(bare(annotation))[1]
        else:
            return None
    return annotation


def spell(path: Sequence[Segment]) -> str:
    """Return a path as text, such as spec.rewards[0].weight."""
    text = ""
    for segment in path:
        text += f"[{segment}]" if isinstance(segment, int) else f".{segment}" if text else segment
    return text
