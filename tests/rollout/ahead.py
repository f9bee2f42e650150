"""Lets vLLM on the CPU schedule ahead, as it does on accelerators.

The scheduler, the queue of steps and the model runner are then those that vLLM uses on accelerators: a step is planned, and starts from tokens
that the scheduler has not seen, before the output of the step before it is processed. vLLM itself switches this off on the
CPU (`CpuPlatform.check_and_update_config`), where a step has ended when it has been started, so that nothing is gained. The output of a
step is copied from the device by a stream of CUDA, for which stand-ins are used: on the CPU there is nothing to copy or to wait for.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class Event:
    """Stands in for torch.cuda.Event: what it marks has ended already."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


WORKER = "tests.rollout.ahead_worker.AheadWorker"
"""The class of vLLM's workers that are processes of their own, by the name by which vLLM imports it (`worker_cls`)."""


@contextlib.contextmanager
def with_stand_ins() -> Iterator[None]:
    """Context manager: vLLM's model runner finds streams and events of CUDA in the body."""
    with (
        mock.patch.object(torch.cuda, "Event", Event),
        mock.patch.object(torch.cuda, "current_stream", return_value=None),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
    ):
        yield


@contextlib.contextmanager
def scheduling_ahead() -> Iterator[None]:
    """Context manager: engine cores that are built and used in the body schedule ahead. Their workers may be processes of class `WORKER`."""
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config

    def decided(configuration: Any) -> None:
        decide(configuration)
        configuration.scheduler_config.async_scheduling = True

    with (
        with_stand_ins(),
        mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(decided)),
    ):
        yield
