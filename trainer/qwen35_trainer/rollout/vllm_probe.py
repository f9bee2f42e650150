"""Probes on vLLM: requests for the log-probs of their prompts, which are compared with the log-probs of the trainer.

vLLM also has `trace_decode_token_ids` (vllm-project/vllm#46701), which replays tokens one step after another and so tests the kernels
of decoding. It needs `enable_trace_replay`, for which vLLM keeps the tokens of every step on the device. It has not been tried here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen35_trainer.rollout.vllm_requests import CoreRequests, NewTokens


class VLLMProbe:
    """The running probe, if any: one request to the engine core for each sequence, and the results so far.

    A probe compares the log-probs of vLLM with those of the trainer. Each request returns the log-probs of one sequence.
    """

    def __init__(self, requests: CoreRequests) -> None:
        self._requests = requests
        self._names: list[str] = []
        self._log_probs: dict[str, NDArray[np.float32]] = {}

    @property
    def running(self) -> bool:
        return bool(self._names)

    @property
    def computed_in_part(self) -> bool:
        """Whether the last step computed a part of a sequence of the probe, but not the end of that sequence."""
        return self._requests.prefilling(self._names)

    def start(self, sequences: Sequence[NDArray[np.int32]], lora_request: Any = None) -> None:  # noqa: ANN401
        """Begin a probe of `sequences`: add a request for each of them. A probe that has not ended is dropped first.

        sequences: (T,) token ids each. The requests get the next free slots, before all waiting requests. lora_request:
        vLLM's LoRARequest of the adapter to compute with; None: no adapter.
        """
        self.drop()
        self._names = [f"probe-{number}" for number in range(len(sequences))]
        for name, sequence in zip(reversed(self._names), reversed(sequences), strict=True):
            # vLLM reads no cached blocks for a request with `prompt_logprobs`, and no sequence has this salt.
            self._requests.add(
                name, sequence.tolist(), _parameters(), salt="probe", lora_request=lora_request, first=True
            )

    def drop(self) -> None:
        self._requests.abort(self._names)
        self._names.clear()
        self._log_probs.clear()

    def has(self, new: NewTokens) -> bool:
        """Return whether the tokens belong to a request of the probe."""
        return new.request in self._names

    def add(self, new: NewTokens) -> tuple[NDArray[np.float32], ...] | None:
        """Add the result of one request.

        Returns the log-probs of all sequences if no other result is missing; otherwise None. Raises RuntimeError if
        vLLM ended the request without log-probs.
        """
        if new.prompt_log_probs is None:
            raise RuntimeError(
                f"vLLM ended a sequence of the probe without log-probs, with the reason {new.finish_reason}"
            )
        self._log_probs[new.request] = new.prompt_log_probs.copy()
        if len(self._log_probs) < len(self._names):
            return None
        result = tuple(self._log_probs[name] for name in self._names)
        self._names.clear()
        self._log_probs.clear()
        return result


def _parameters() -> Any:  # noqa: ANN401  # vLLM's SamplingParams
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0)
