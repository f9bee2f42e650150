"""Load the libraries of an accelerator in a train worker, in the only order in which they work.

    torch_npu ─► mindspeed.megatron_adaptor ─► repatch(settings) ─► process group ─► model-parallel groups
    registers    replaces functions of         replaces those that   torch's, with    megatron-core's, by
    "npu", hccl  megatron-core                 depend on the run     hccl             replaced functions

Profile Ascend needs the first step, and with engine Megatron all of them; other profiles need none. `load` makes the steps before the process
group, in every worker. `require_mindspeed` is the check right before the model-parallel groups.

What goes wrong in another order: torch cannot form a group over hccl without torch_npu. A module that imported a function of megatron-core before the
adaptor keeps the original. When the adaptor is imported, it applies the patches of its default settings, because it reads settings from
the command line; groups that are formed before `repatch` are those of the defaults. All three would end later, with errors that do
not name the cause, or not at all. Here they are refused.

The entry points are those of MindSpeed's branches core_r0.16.0 and core_r0.18.0, as verl calls them (`_mindspeed_repatch`).
Hardware: none of this has run with MindSpeed or on an NPU. A stand-in records the order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch.distributed as dist

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.manifest import TrainingSpec

ADAPTOR: Final = "mindspeed.megatron_adaptor"
GUIDE: Final = "docs/howto/ascend.md has the steps."

_applied: dict[str, object] | None = None
"""The settings with which MindSpeed's patches were applied in this process. None: they were not."""


class LibrariesUnusable(RuntimeError):
    """Raised if a library of the accelerator cannot be imported, or if the libraries were loaded in a wrong order.

    The message names the library, or both steps, and the fix.
    """

    failure = FailureReason.MANIFEST_ERROR


def load(spec: TrainingSpec) -> None:
    """Import the libraries that the profile and the engine of `spec` need. Call it before the process group exists.

    Raises LibrariesUnusable. It may be called again until a group exists: the last settings count.
    """
    if spec.accelerator.profile != "Ascend":
        return
    if dist.is_initialized():
        message = "the process group exists already, but torch_npu registers its backend hccl, and MindSpeed replaces functions."
        raise LibrariesUnusable(f"{message} Call accelerator_libraries.load before init_process_group.")
    _import(
        "torch_npu", "accelerator.profile Ascend", "Install requirements/trainer-ascend-arm64.txt (-amd64 on x86-64)."
    )
    if spec.train.engine == "Megatron":
        _apply_mindspeed(mindspeed_settings(spec))


def mindspeed_settings(spec: TrainingSpec) -> dict[str, object]:
    """Return the settings of a run that decide which of MindSpeed's patches are applied.

    The names are those of Megatron-LM's and MindSpeed's command lines, and those of `overrideTransformerConfig`, which cannot
    change the others (`RESERVED_SETTINGS`). MindSpeed also gives them to each TransformerConfig whose
    caller does not set them (`engines/megatron/config.py` sets all that are its fields).
    """
    degrees = spec.train.parallelism
    return {
        # Without it, MindSpeed builds masks of positions × positions, for which it needs a fixed micro-batch size.
        "use_flash_attn": True,
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": degrees.tensor,
        "sequence_parallel": degrees.tensor > 1,
        "pipeline_model_parallel_size": degrees.pipeline,
        "context_parallel_size": degrees.context,
        "expert_model_parallel_size": degrees.expert,
        "expert_tensor_parallel_size": degrees.expertTensor,
        **spec.train.overrideTransformerConfig,
    }


def has_mindspeed() -> bool:
    """Whether MindSpeed's patches are applied in this process."""
    return _applied is not None


def require_mindspeed(spec: TrainingSpec) -> None:
    """Raise LibrariesUnusable if megatron-core's groups would be formed without MindSpeed's patches for `spec`.

    Only profile Ascend needs the patches.
    """
    if spec.accelerator.profile != "Ascend" or _applied == (wanted := mindspeed_settings(spec)):
        return
    if _applied is None:
        message = "the model-parallel groups would be formed before MindSpeed's patches are applied."
    else:
        changed = [
            f"{name} {_applied.get(name)}, not {wanted.get(name)}"
            for name in {**_applied, **wanted}
            if _applied.get(name) != wanted.get(name)
        ]
        message = f"MindSpeed's patches were applied for another run: {', '.join(changed)}."
    raise LibrariesUnusable(f"{message} Call accelerator_libraries.load with the run's manifest first.")


def _apply_mindspeed(settings: dict[str, object]) -> None:
    global _applied  # noqa: PLW0603  # the patches are a state of the process
    if "megatron.core" in sys.modules and ADAPTOR not in sys.modules:
        message = f"megatron.core was imported before {ADAPTOR}, so modules that took functions from it keep those without patches."
        raise LibrariesUnusable(
            f"{message} Call accelerator_libraries.load before the first import of engines.megatron.engine."
        )
    with _bare_command_line():
        fix = f"Install MindSpeed for the installed megatron-core, or set train.engine to FSDP. {GUIDE}"
        adaptor: Any = _import(ADAPTOR, "train.engine Megatron with accelerator.profile Ascend", fix)
    groups: Any = sys.modules.get("megatron.core.parallel_state")
    if groups is not None and groups.is_initialized():
        message = "the model-parallel groups exist already, so they are those of MindSpeed's default settings."
        raise LibrariesUnusable(f"{message} Call accelerator_libraries.load before MegatronEngine is built.")
    adaptor.repatch(settings)
    _applied = settings


def _import(library: str, user: str, fix: str) -> ModuleType:
    try:
        return import_module(library)
    except (ImportError, OSError) as error:  # OSError: a library of CANN that ctypes cannot load
        raise LibrariesUnusable(f"{library}, which {user} needs, cannot be imported: {error}. {fix}") from error


@contextmanager
def _bare_command_line() -> Iterator[None]:
    """Hide the arguments of this process, which are Ray's: MindSpeed takes them for settings when it is imported."""
    arguments = sys.argv[1:]
    del sys.argv[1:]
    try:
        yield
    finally:
        sys.argv[1:] = arguments
