"""Stand-in for torch_npu: records when it is imported."""

import torch.distributed as dist
from recorded import STEPS

STEPS.append(("torch_npu is imported", {"process group": dist.is_initialized()}))
