"""Checks whether vLLM can divide a model among the devices of a replica (tensor parallelism).

    sizes                                                  each device has
    query heads, heads of Gated DeltaNet layers            a whole number of heads
    key and value heads                                    a whole number of heads, or several devices have the same head
    channels of a dense MLP, or of a shared expert         a whole number of channels
    channels of experts                                    a whole number of channels; with expert parallelism, all channels
    experts                                                a part of each expert; with expert parallelism, some whole experts.
                                                           There must be at least as many experts as devices
    rows of the vocabulary, filled up to a multiple of 64  a whole number of rows

The rules are from vLLM 0.32: models/qwen3_next.py (Qwen3NextAttention, Qwen3NextSparseMoeBlock), models/qwen3_moe.py, which
has the same ones for a model without Gated DeltaNet and shared experts, layers/mamba (Gated DeltaNet),
layers/fused_moe/config.py (FusedMoEConfig) and layers/vocab_parallel_embedding.py in vllm/model_executor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qwen35_trainer.manifest.model import RandomModelSpec
from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.training import TrainingSpec

DIVIDED = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
"""Fields of config.json whose values the number of devices must always divide."""
SHARED = "num_key_value_heads"
"""Field of config.json with the number of key and value heads, of which several devices may have the same one."""
VOCABULARY, VOCABULARY_MULTIPLE = "vocab_size", 64
"""The vocabulary's field in config.json, and the multiple to which vLLM fills up its rows (DEFAULT_VOCAB_PADDING_SIZE)."""
EXPERTS = "num_experts"

RANDOM_NAMES = {
    "num_attention_heads": "attentionHeads",
    SHARED: "keyValueHeads",
    "linear_num_key_heads": "linearKeyHeads",
    "linear_num_value_heads": "linearValueHeads",
    "intermediate_size": "intermediateSize",
    "shared_expert_intermediate_size": "intermediateSize",
    EXPERTS: "experts",
}
"""Field of config.json → the field of a random model that determines its value."""


@dataclass(frozen=True, slots=True)
class DividedSizes:
    """The sizes of a model that vLLM divides among the devices of a replica.

    sizes: field of config.json → its value. names: field of config.json → the name that messages show for the
    field. Fields that are not in `names` are shown under their own names.
    """

    sizes: Mapping[str, int]
    names: Mapping[str, str]

    @classmethod
    def of_random(cls, shape: RandomModelSpec) -> "DividedSizes":
        """Return the sizes of a random model. Its shared expert has the same width as each of its routed experts."""
        left_out = ("intermediate_size",) if shape.experts else ("shared_expert_intermediate_size", EXPERTS)
        names = {field: name for field, name in RANDOM_NAMES.items() if field not in left_out}
        sizes = {field: getattr(shape, name) for field, name in names.items()} | {VOCABULARY: shape.vocabulary}
        return cls(sizes, names | {VOCABULARY: "characters and special tokens"})

    @classmethod
    def of_configuration(cls, config: Mapping[str, object]) -> "DividedSizes":
        """Return the sizes in the text model's section of a config.json.

        Fields that are absent or not positive integers are left out.
        """
        of_experts = ("moe_intermediate_size", "shared_expert_intermediate_size", EXPERTS)
        layers = of_experts if EXPERTS in config else ("intermediate_size",)
        sizes = {name: config.get(name) for name in (*DIVIDED, SHARED, *layers, VOCABULARY)}
        return cls({name: value for name, value in sizes.items() if isinstance(value, int) and value > 0}, {})

    def indivisible(self, devices: int, *, expert_parallel: bool = False) -> list[str]:
        """Return the sizes that cannot be divided among `devices` devices, each as text, such as "num_attention_heads 6".

        expert_parallel: whether each expert stays whole on one device (enable_expert_parallel).
        """
        return [
            f"{self.names.get(name, name)} {shown}"
            for name, value in self.sizes.items()
            if (shown := _indivisible(name, value, devices, expert_parallel=expert_parallel)) is not None
        ]


def _indivisible(name: str, value: int, devices: int, *, expert_parallel: bool) -> str | None:
    """Return the size as problems show it if it cannot be divided among this number of devices; otherwise None."""
    if name == EXPERTS:
        return str(value) if value < devices else None
    if name == VOCABULARY:
        rows = value + -value % VOCABULARY_MULTIPLE
        return f"{value} (filled up to {rows})" if rows % devices else None
    if name == "moe_intermediate_size" and expert_parallel:
        return None
    if name == SHARED and devices % value == 0:
        return None
    return str(value) if value % devices else None


def split_problems(spec: TrainingSpec, sizes: DividedSizes) -> Iterator[Problem]:
    """Check that vLLM can divide the model among the devices of a replica.

    Replicas of the straggler lane, which are reserved for long sequences, are checked too. Nothing is checked if the
    engine is not VLLM. sizes: the sizes of the spec's model.
    """
    if spec.rollout is None or spec.rollout.engine != "VLLM":
        return
    expert_parallel = spec.rollout.vllm is not None and spec.rollout.vllm.expert_parallel
    numbers = {"spec.rollout.tensorParallel": spec.rollout.tensorParallel}
    if spec.rollout.stragglerLane is not None:
        numbers["spec.rollout.stragglerLane.tensorParallel"] = spec.rollout.stragglerLane.tensorParallel
    for path, devices in numbers.items():
        if indivisible := sizes.indivisible(devices, expert_parallel=expert_parallel):
            smaller = (size for size in range(1, devices) if devices % size == 0)
            fitting = max(size for size in smaller if not sizes.indivisible(size, expert_parallel=expert_parallel))
            message = f"vLLM cannot divide {', '.join(indivisible)} of this model among {devices} devices."
            yield Problem(path, message, f"Use {fitting}, or a model with other sizes.")
