"""spec.evaluation: evaluation on held-out prompts."""

from pydantic import Field

from qwen35_trainer.manifest.base import Section


class EvaluationSpec(Section):
    """Frequency and sampling of evaluations on held-out prompts."""

    everyUpdates: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Updates between evaluations; 0 evaluates only before and after training. Default 0, because "
        "evaluation takes rollout time. verl: trainer.test_freq.",
    )
    atStart: bool = Field(
        True,
        description="Evaluate before the first update. Default true, to have a baseline. verl: "
        "trainer.val_before_train.",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Sampling temperature of evaluations; 0 is greedy. Default 0, which has the lowest noise. verl: "
        "actor_rollout_ref.rollout.val_kwargs.temperature.",
    )
    samplesPerPrompt: int = Field(
        1,
        ge=1,
        le=1024,
        description="Responses per prompt, whose scores are averaged; with several, pass@k is measured too, which needs a "
        "temperature above 0. Default 1, which is enough for greedy sampling. verl: actor_rollout_ref.rollout.val_kwargs.n.",
    )
    maxPrompts: int | None = Field(
        None,
        ge=1,
        le=100_000_000,
        description="Maximum number of prompts to evaluate, taken from the beginning. Default: all. verl: "
        "data.val_max_samples.",
    )
