"""Base class and types that all sections of the spec share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A mapping of the manifest: frozen, without unknown keys, and strictly typed ("3" is not an integer, 1 is a valid float).

    Attributes have the manifest's names. Where such a name is a Python keyword the attribute ends in an underscore
    (`async_`, `lambda_`). Python code may use either spelling; in a manifest only the name without the underscore is valid.
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


class PersistentVolumeClaimSpec(Section):
    """A folder in the volume of a PersistentVolumeClaim in the training's namespace."""

    claimName: str = Field(
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        description="Name of the PersistentVolumeClaim, in the training's namespace. Several nodes mount it, so its "
        "access mode must be ReadWriteMany or ReadOnlyMany. No default. verl: none.",
    )
    path: str = Field(
        "",
        max_length=1024,
        description="Folder in the volume, relative to its root. Default: the root. verl: none.",
    )


FUNCTION = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
"""Pattern of a reference to a user's function: module:function."""
MAX_PATH_CHARACTERS = 1024
NOT_IN_HOME = r"^[^~]"
"""Pattern of a path that does not start with ~. A shell would expand ~ to the home folder; here it would be a folder's name."""
PathName = Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARACTERS, pattern=NOT_IN_HOME)]
