"""spec.evaluation: measuring on held-out prompts."""

from pydantic import Field

from qwen35_trainer.spec.base import Section


class Evaluation(Section):
    """When and how the validation prompts are answered and scored."""

    everyUpdates: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Updates between evaluations; 0 is only before and after training. 0, since evaluation takes "
        "rollout time. verl: trainer.test_freq.",
    )
    atStart: bool = Field(
        True,
        description="Evaluate before the first update. On: without it there is nothing to compare with. "
        "verl: trainer.val_before_train.",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Sampling temperature; 0 is greedy. 0 for the least noise. "
        "verl: actor_rollout_ref.rollout.val_kwargs.temperature.",
    )
    samplesPerPrompt: int = Field(
        1,
        ge=1,
        le=1024,
        description="Responses per prompt; their mean counts. 1 is enough for greedy ones. "
        "verl: actor_rollout_ref.rollout.val_kwargs.n.",
    )
    maxPrompts: int | None = Field(
        None,
        ge=1,
        le=100_000_000,
        description="Evaluate only the first so many prompts. By default all. verl: data.val_max_samples.",
    )
