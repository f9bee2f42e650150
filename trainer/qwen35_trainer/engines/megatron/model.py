"""The model of one rank: a pipeline stage, whose layers are divided over tensor- and expert-parallel ranks."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from qwen35_trainer.engines.megatron import vocabulary_parallel
from qwen35_trainer.engines.megatron.config import transformer_config
from qwen35_trainer.engines.megatron.layers import stage_layers
from qwen35_trainer.engines.megatron.layout import Layout
from qwen35_trainer.engines.megatron.router_losses import RouterLosses
from qwen35_trainer.engines.micro_batch import MicroBatch
from qwen35_trainer.models.qwen3_5.classes import HFConfig
from qwen35_trainer.models.qwen3_5.head import TokenScores


class StageModel(GPTModel):
    """A pipeline stage, or one virtual stage of a pipeline stage.

    The model's last stage returns hidden states after the final norm, not logits. `scores` computes logits only for
    the rows that predict trained tokens.
    """

    vocabulary: int
    """Number of tokens of the model, without the padding that tensor parallelism may add."""
    masks_padding: bool
    """Whether the layers get to know which tokens are padding, which the losses of routers need."""

    def _postprocess(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states

    def inputs(self, micro: MicroBatch) -> dict[str, Tensor | None]:
        """Return the arguments of a call of this model for the padded sequences of `micro`.

        Tokens and positions are (b, s) int64, b sequences of s tokens. s is rounded up to a multiple of the number of
        tensor-parallel ranks; padding on the right does not affect the tokens before it. The call returns (s, b,
        channels); with sequence parallelism, each rank gets its part of the s tokens.
        """
        tokens = micro.inputs.tokens
        tokens = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % self.config.tensor_model_parallel_size))
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        inputs: dict[str, Tensor | None] = {"input_ids": tokens, "position_ids": positions, "attention_mask": None}
        if self.masks_padding:
            inputs["padding_mask"] = self._of_rank(positions >= micro.lengths.unsqueeze(1))
        return inputs

    def _of_rank(self, padding: Tensor) -> Tensor:
        """Return the columns of the tokens that this rank's layers get. padding: (b, s) bool."""
        # megatron-core takes these columns itself, but only where the model begins.
        if self.pre_process or not self.config.sequence_parallel:
            return padding
        group = self.pg_collection.tp
        return padding.chunk(group.size(), dim=1)[group.rank()]

    def scores(
        self, hidden: Tensor, micro: MicroBatch, temperature: float, *, with_entropy: bool, float32_logits: bool
    ) -> TokenScores:
        """Compute log-probs, and entropies if `with_entropy`, of the trained tokens of `micro`, as tables (samples, response
        tokens).

        hidden: the result of a call with the arguments from `inputs`. Collective over the tensor-parallel ranks of the
        last stage, all of which get the scores.
        """
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)  # its gradient is summed over the ranks
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        sequences, positions = micro.rows // micro.inputs.tokens.shape[1], micro.rows % micro.inputs.tokens.shape[1]
        tied = self.share_embeddings_and_output_weights
        scores = vocabulary_parallel.token_scores(
            hidden[positions, sequences],
            self.shared_embedding_or_output_weight() if tied else self.output_layer.weight,
            micro.targets,
            temperature,
            group,
            vocabulary=self.vocabulary,
            with_entropy=with_entropy,
            float32_logits=float32_logits,
            kept=micro.kept,
        )
        entropy = None if scores.entropy is None else micro.table(scores.entropy)
        return TokenScores(micro.table(scores.log_probs), entropy)


def build_stages(
    model: HFConfig,
    layout: Layout,
    precision: torch.dtype,
    *,
    recompute: bool = False,
    router_losses: RouterLosses | None = None,
) -> list[StageModel]:
    """Build this rank's pipeline stage without loading weights, and return the list of its virtual stages.

    By default, a pipeline stage has one virtual stage. megatron-core's model-parallel process groups must exist.

    model: the configuration of a text model in transformers. recompute: whether the backward pass computes the activations
    of each layer again. router_losses: where the routers add their losses; None: they have none.
    """
    config = transformer_config(model, layout, precision, recompute=recompute)
    if layout.virtual == 1:
        return [_build_stage(model, config, None, router_losses)]
    return [_build_stage(model, config, number, router_losses) for number in range(layout.virtual)]


def _build_stage(
    model: HFConfig, config: TransformerConfig, virtual_stage: int | None, router_losses: RouterLosses | None
) -> StageModel:
    rotary = model.rope_parameters
    stage = StageModel(
        config,
        stage_layers(config, list(model.layer_types), virtual_stage, router_losses),
        vocab_size=model.vocab_size + -model.vocab_size % config.tensor_model_parallel_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=rotary.get("partial_rotary_factor", 1.0),
        rotary_base=rotary["rope_theta"],
        vp_stage=virtual_stage,
    )
    stage.vocabulary = model.vocab_size
    stage.masks_padding = router_losses is not None
    return stage.to(torch.cuda.current_device())
