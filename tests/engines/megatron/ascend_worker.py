"""A train worker of profile Ascend with stand-ins for its libraries: python -m tests.engines.megatron.ascend_worker FOLDER WORDS…

It joins a pool of one rank, then loads the libraries in wrong orders, and prints what it recorded as JSON. The words are arguments that
Ray gives to a worker's process.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "ascend_stand_ins"))
warnings.filterwarnings("ignore", module=r"megatron\.")

import torch.distributed as dist  # noqa: E402
from recorded import STEPS  # noqa: E402

from qwen35_trainer.engines import accelerator_libraries  # noqa: E402
from qwen35_trainer.engines.accelerator_libraries import LibrariesUnusable  # noqa: E402
from qwen35_trainer.manifest import parse_spec  # noqa: E402
from qwen35_trainer.runtime import machine  # noqa: E402
from qwen35_trainer.runtime.site import WorkerLocation  # noqa: E402
from qwen35_trainer.runtime.train_worker import TrainWorker  # noqa: E402
from tests.distributed.samples import spec_of  # noqa: E402

OVERRIDES: dict[str, Any] = {"moe_shared_expert_overlap": True}


class Worker(TrainWorker):
    """Not an actor of Ray."""

    def location(self) -> WorkerLocation:
        return WorkerLocation("here", "node", "0")


def message_of(spec: Any) -> str:
    try:
        accelerator_libraries.load(spec)
    except LibrariesUnusable as error:
        return str(error)
    return "it loaded"


def main(folder: Path) -> None:
    wanted = spec_of(1)
    wanted["accelerator"] = {"profile": "Ascend", "devicesPerNode": 1}
    wanted["train"] |= {"engine": "Megatron", "overrideTransformerConfig": OVERRIDES}
    spec, problems = parse_spec(wanted)
    assert spec is not None, problems
    # Tensors stay on the CPU: only the order of the libraries is that of NPUs.
    machine.BACKENDS["Ascend"], machine.DEVICE_TYPES["Ascend"] = "gloo", "cpu"
    form = dist.init_process_group

    def recording(*arguments: Any, **options: Any) -> None:
        STEPS.append(("the process group is formed", {}))
        form(*arguments, **options)

    dist.init_process_group = recording
    worker = Worker(
        spec,
        0,
        vocabulary=23,
        pictures=False,
        base=folder,
        threads=1,
        logs=folder,
        transport="ObjectStore",
        publications=None,
    )
    worker.join(0, 1, *worker.listen(1))
    words = sys.argv[2:]
    messages = {"with a process group": message_of(spec)}
    dist.destroy_process_group()
    messages["with model-parallel groups"] = message_of(spec)
    print(json.dumps({"steps": STEPS, "messages": messages, "words": words}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
