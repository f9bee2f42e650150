"""What the stand-ins and the worker of the test have done in this process, in order."""

from typing import Any

STEPS: list[tuple[str, dict[str, Any]]] = []
