"""Serialises and parses the messages between operator and trainer. Each message is JSON text in one key of a ConfigMap."""

from pydantic import BaseModel, ConfigDict, ValidationError

MAX_MESSAGE_BYTES = 256 * 1024
"""Maximum size of a message in UTF-8, in bytes. `parse` refuses a larger one. Operator and
trainer write far smaller messages."""


class ContractError(ValueError):
    """Raised for a message that cannot be parsed. Its text names the key of the ConfigMap and what is wrong."""


class ContractMessage(BaseModel):
    """Base class of the messages between operator and trainer: immutable, with strict types.

    Parsing ignores unknown keys, so that an older operator or trainer can read the messages of a newer one.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    def text(self) -> str:
        """Return the message as JSON text. Fields that are None are left out."""
        return self.model_dump_json(exclude_none=True)


def parse[M: ContractMessage](kind: type[M], text: str | bytes, key: str) -> M:
    """Parse a message of class `kind` from JSON text.

    text: the JSON, as a string or as UTF-8 bytes. key: the key of the ConfigMap that contains the text, for error
    messages. Raises ContractError if the text is larger than MAX_MESSAGE_BYTES or is not a valid message.
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
