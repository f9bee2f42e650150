"""A user's reward function, next to the data on a claim: it does not depend on the tests, and only the pods import it.

It calls a judge that answers one question at a time. The test sets how long an answer takes: the training leaves the cores to
what a test waits for, and makes an update within two seconds when that is what the test waits for.
"""

import asyncio
import json
from pathlib import Path

PACE = Path(__file__).with_name("seconds-per-answer")
JUDGED = Path("/var/lib/qwen35/run/judged.jsonl")
"""In the run's folder, which is on the claim, too: the fields of the row of each response that was judged."""
TURN = asyncio.Lock()


async def digit(prompt: str, response: str, answer: str | None, metadata: dict[str, object]) -> float:
    """The share of the response's characters that are the answer."""
    async with TURN:
        await asyncio.sleep(float(PACE.read_text()))
    write_down(metadata)
    return response.count(str(answer)) / max(1, len(response))


def write_down(metadata: dict[str, object]) -> None:
    with JUDGED.open("a") as file:
        file.write(json.dumps(metadata) + "\n")
