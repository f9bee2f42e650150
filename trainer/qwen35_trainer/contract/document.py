"""One message as the value of a ConfigMap's key."""

from pydantic import BaseModel, ConfigDict, ValidationError

LONGEST = 256 * 1024
"""Characters of a message that is still read: far above what either side writes."""


class ContractError(ValueError):
    """A message that is none; says which key and what is wrong with it."""


class Message(BaseModel):
    """Frozen and strict, except that unknown keys are ignored: an older side reads what a newer one writes."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    def text(self) -> str:
        """The message as it is written."""
        return self.model_dump_json(exclude_none=True)


def parse[M: Message](kind: type[M], text: str, key: str) -> M:
    """The message in `text`. Raises ContractError."""
    if len(text) > LONGEST:
        raise ContractError(f"{key} has {len(text)} characters; at most {LONGEST} are read")
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, detail['loc'])) or 'text'}: {detail['msg']}" for detail in error.errors()[:3]
        )
        raise ContractError(f"{key} is no {kind.__name__}: {wrong}") from None
