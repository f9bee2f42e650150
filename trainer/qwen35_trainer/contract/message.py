"""Writes and parses the messages between operator and trainer, each the value of one key in a ConfigMap."""

from pydantic import BaseModel, ConfigDict, ValidationError

MAX_MESSAGE_BYTES = 256 * 1024
"""Maximum length of a message in UTF-8; a longer one is refused. Operator and trainer write far shorter messages."""


class ContractError(ValueError):
    """A message cannot be read. str() of this error names the key of the ConfigMap and what is wrong."""


class ContractMessage(BaseModel):
    """Base class of the messages, frozen and strict.

    Parsing ignores unknown keys, so that an older operator or trainer can read the messages of a newer one.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    def text(self) -> str:
        """Return the message as JSON."""
        return self.model_dump_json(exclude_none=True)


def parse[M: ContractMessage](kind: type[M], text: str | bytes, key: str) -> M:
    """Parse a message of class `kind` from JSON text.

    text: as text, or in UTF-8. key: the ConfigMap's key, for errors. Raises ContractError if the text is not valid.
    """
    encoded = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise ContractError(f"{key} has more than {MAX_MESSAGE_BYTES} bytes, which is the maximum")
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, detail['loc'])) or 'text'}: {detail['msg']}" for detail in error.errors()[:3]
        )
        raise ContractError(f"{key} is not a {kind.__name__}: {problems}") from None
