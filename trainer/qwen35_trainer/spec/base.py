"""What every section of the spec shares."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """One mapping of the manifest: frozen, typed strictly ("3" is no integer, 1 is a fine float), no unknown keys.

    Attributes carry the manifest's names. Where such a name is a Python keyword the attribute ends in an
    underscore (`async_`, `lambda_`) and Python code may use either spelling; a manifest may use only its own.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_by_alias=True,
        validate_by_name=True,
        serialize_by_alias=True,
    )


class PersistentVolumeClaim(Section):
    """A folder of a PersistentVolumeClaim in the training's namespace."""

    claimName: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="Name of the claim, in the training's namespace; several nodes mount it, so ReadWriteMany or "
        "ReadOnlyMany. No default: only its owner knows it. verl: none.",
    )
    path: str = Field(
        "",
        max_length=1024,
        description="Folder inside the volume, relative to its root. Empty, the default, is the root. verl: none.",
    )


FUNCTION = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
"""A function of the user's own: module:function."""
LONGEST_PATH = 1024
PathName = Annotated[str, Field(min_length=1, max_length=LONGEST_PATH)]
