"""Whether vLLM can divide a model among the devices of a replica (tensor parallelism).

vLLM 0.32 gives each device a whole number of the query heads, of the heads of Gated DeltaNet layers, and of the channels
of a dense MLP. Key and value heads may also be fewer than the devices: several devices then have the same head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qwen35_trainer.manifest.model import RandomModelSpec
from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.training import TrainingSpec

HUB_NAMES = {
    "attentionHeads": "num_attention_heads",
    "keyValueHeads": "num_key_value_heads",
    "linearKeyHeads": "linear_num_key_heads",
    "linearValueHeads": "linear_num_value_heads",
    "intermediateSize": "intermediate_size",
}
"""Field of a random model → the field of config.json with the same meaning."""
SHARED = ("keyValueHeads", HUB_NAMES["keyValueHeads"])
"""Names of the number of heads that several devices may share."""


@dataclass(frozen=True, slots=True)
class DividedSizes:
    """The sizes of a model that vLLM divides among devices: name of a field → its value."""

    values: Mapping[str, int]

    @classmethod
    def of_random(cls, shape: RandomModelSpec) -> "DividedSizes":
        """Return the sizes of a random model. The width of experts is left out, because vLLM pads it."""
        names = [name for name in HUB_NAMES if name != "intermediateSize" or not shape.experts]
        return cls({name: getattr(shape, name) for name in names})

    @classmethod
    def of_configuration(cls, config: Mapping[str, object]) -> "DividedSizes":
        """Return the sizes in the text model's part of a config.json. Absent fields are left out, and the width of experts."""
        names = [name for name in HUB_NAMES.values() if name != "intermediate_size" or "num_experts" not in config]
        return cls({name: value for name in names if isinstance(value := config.get(name), int) and value > 0})

    def indivisible(self, devices: int) -> list[str]:
        """Return the sizes, as "NAME VALUE", that cannot be divided among this number of devices."""
        return [
            f"{name} {value}"
            for name, value in self.values.items()
            if value % devices and not (name in SHARED and devices % value == 0)
        ]


def split_problems(spec: TrainingSpec, sizes: DividedSizes) -> Iterator[Problem]:
    """Yield a problem for the pool and one for the straggler lane if their replicas cannot divide the model.

    sizes: those of the spec's model. Without a rollout pool of engine VLLM there are no problems.
    """
    if spec.rollout is None or spec.rollout.engine != "VLLM":
        return
    numbers = {"spec.rollout.tensorParallel": spec.rollout.tensorParallel}
    if spec.rollout.stragglerLane is not None:
        numbers["spec.rollout.stragglerLane.tensorParallel"] = spec.rollout.stragglerLane.tensorParallel
    for path, devices in numbers.items():
        if indivisible := sizes.indivisible(devices):
            fitting = max(size for size in range(1, devices) if devices % size == 0 and not sizes.indivisible(size))
            message = f"vLLM cannot divide {', '.join(indivisible)} of this model among {devices} devices."
            yield Problem(path, message, f"Use {fitting}, or a model with other sizes.")
