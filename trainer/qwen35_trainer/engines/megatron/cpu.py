"""Let megatron-core run on a CPU, for tests and small runs without an accelerator.

megatron-core names the device "cuda" in its code: in factories, in the type of a parameter, in streams and in random
states. `install` replaces the functions of the table in the whole process. Call it only in a process that does nothing but
train with Megatron on a CPU.

| megatron-core calls | what the replacement does |
|---|---|
| torch.cuda.current_device() | returns the device "cpu" |
| torch.zeros and other factories with device="cuda" | create the tensor on the CPU |
| Tensor.cuda() | returns the tensor itself |
| Tensor.type() | returns the name of the type with "cuda", as of a tensor on a GPU |
| torch.cuda's functions for random state and seed | read or set the random state of the CPU |
| torch.cuda.synchronize(), empty_cache() | do nothing |
| streams and events | do nothing, because operations on a CPU run in order |
| all_to_all_single with split sizes in tensors | converts the sizes to lists, which gloo needs |
| all_gather of parts with different numbers of rows | pads the parts, because gloo needs equal sizes |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from megatron.core.tensor_parallel import random
from torch import Tensor

CPU = torch.device("cpu")
FACTORIES = (
    *("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
)
"""Functions of torch that megatron-core calls with device="cuda"."""


class _Idle:
    """A stream or an event whose methods do nothing, because operations on a CPU run in order."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def record_event(self, *_: object) -> _Idle:
        return self

    def synchronize(self) -> None: ...


def install() -> None:
    """Replace functions of torch so that megatron-core, whose code names the device "cuda", runs on a CPU.

    Also turns off torch.compile, because compilation would take longer than a small run. A second call changes nothing.
    """
    if getattr(torch.cuda.current_device, "of_cpu", False):
        return
    torch._dynamo.config.disable = True
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    _replace_cuda()
    _replace_tensor_methods()
    dist.all_to_all_single = _with_lists(dist.all_to_all_single)
    dist.all_gather = _with_padding(dist.all_gather)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def create(*arguments: Any, **options: Any) -> Tensor:  # noqa: ANN401  # the arguments of any factory
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = CPU
        return factory(*arguments, **options)

    return create


def _replace_cuda() -> None:
    def current_device() -> torch.device:
        return CPU

    current_device.of_cpu = True  # type: ignore[attr-defined]

    @contextmanager
    def stream(_: object) -> Iterator[None]:
        yield

    def set_state(state: Tensor, *_: object) -> None:
        torch.set_rng_state(state)

    def get_state(*_: object) -> Tensor:
        return torch.get_rng_state()

    def seed(value: int) -> None:
        torch.manual_seed(value)

    replacements: dict[str, Any] = {
        "current_device": current_device,
        "get_rng_state": get_state,
        "set_rng_state": set_state,
        "manual_seed": seed,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "Stream": _Idle,
        "Event": _Idle,
        "current_stream": _Idle,
        "default_stream": _Idle,
        "stream": stream,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    # These two functions bypass the module torch.cuda.
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _replace_tensor_methods() -> None:
    plain_type = Tensor.type

    def named_type(tensor: Tensor, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401  # as torch's
        if arguments or options:
            return plain_type(tensor, *arguments, **options)
        return plain_type(tensor).replace("torch.", "torch.cuda.", 1)

    Tensor.type = named_type  # type: ignore[method-assign, assignment]
    Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]


def _with_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(exchange)
    def all_to_all_single(output: Tensor, values: Tensor, *sizes: object, **options: object) -> object:
        names = ("output_split_sizes", "input_split_sizes")
        options |= dict(zip(names, sizes, strict=False))
        for name in names:
            if isinstance(value := options.get(name), Tensor):
                options[name] = value.tolist()
        return exchange(output, values, **options)

    return all_to_all_single


def _with_padding(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return an all_gather whose parts may have different numbers of rows. A call with different numbers
    is always synchronous.
    """

    @functools.wraps(gather)
    def all_gather(
        parts: list[Tensor], values: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
    ) -> object:
        if len({part.shape for part in parts}) == 1:
            return gather(parts, values, group, async_op)
        padded = values.new_zeros(max(len(part) for part in parts), *values.shape[1:])
        padded[: len(values)] = values
        gathered = [torch.empty_like(padded) for _ in parts]
        gather(gathered, padded, group)
        for part, whole in zip(parts, gathered, strict=True):
            part.copy_(whole[: len(part)])
        return _Idle() if async_op else None

    return all_gather
