"""Stand-in for MindSpeed's adaptor, with the behaviour of branch core_r0.16.0 that the order depends on.

Its import reads the command line, makes torch.cuda mean another device (`torch_npu.contrib.transfer_to_npu`), and imports megatron-core. `repatch`
replaces the function that forms the model-parallel groups, so groups show whether they were formed with the run's settings.
"""

import sys
from typing import Any

import torch.distributed as dist
from recorded import STEPS

STEPS.append(
    (
        "the adaptor is imported",
        {
            "command line": sys.argv[1:],
            "torch_npu": "torch_npu" in sys.modules,
            "megatron.core": "megatron.core" in sys.modules,
            "process group": dist.is_initialized(),
        },
    )
)

from qwen35_trainer.engines.megatron import cpu  # noqa: E402

cpu.install()

from megatron.core import parallel_state  # noqa: E402

_plain = parallel_state.initialize_model_parallel


def repatch(settings: dict[str, Any]) -> None:
    STEPS.append(("repatch", {"settings": dict(settings), "process group": dist.is_initialized()}))

    def initialize_model_parallel(*arguments: Any, **options: Any) -> None:
        STEPS.append(("the patched function forms the model-parallel groups", {"settings": dict(settings)}))
        _plain(*arguments, **options)

    parallel_state.initialize_model_parallel = initialize_model_parallel
