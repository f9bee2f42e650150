"""The model of one rank: a pipeline stage, whose layers are divided over tensor- and expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.data.expert_choices import NO_CHOICE
from qwen35_trainer.engines.megatron import vocabulary_parallel
from qwen35_trainer.engines.megatron.config import transformer_config
from qwen35_trainer.engines.megatron.layers import head_layers, stage_layers
from qwen35_trainer.engines.megatron.layout import Layout
from qwen35_trainer.engines.megatron.pictures import PictureRotary, tower_of
from qwen35_trainer.engines.megatron.router_losses import RouterLosses
from qwen35_trainer.engines.megatron.router_replay import REPLAYED, LayerChoices
from qwen35_trainer.engines.micro_batch import MicroBatch
from qwen35_trainer.manifest.megatron import SettingValue
from qwen35_trainer.manifest.train import MultiTokenPredictionSpec
from qwen35_trainer.models.qwen3_5 import HFModule, vision
from qwen35_trainer.models.qwen3_5.classes import HFConfig, layer_types, text_part
from qwen35_trainer.models.qwen3_5.head import TokenScores
from qwen35_trainer.models.qwen3_5.pictures import Pictures


class StageModel(GPTModel):
    """A pipeline stage, or one virtual stage of a pipeline stage.

    The model's last stage returns hidden states after the final norm, not logits. `scores` computes logits only for
    the rows that predict trained tokens. With a head for multi-token prediction (`prediction_head.py`), and only while
    gradients are computed, the stage returns the head's hidden states after those of the model; see `of_model_and_head`.
    """

    visual: HFModule | None
    """The vision tower; None in other stages than the first one, and in text models."""
    reads_pictures: bool
    """Whether sequences may have pictures. Without them a vision tower computes nothing."""
    vocabulary: int
    """Number of tokens of the model, without the padding that tensor parallelism may add."""
    masks_padding: bool
    """Whether the layers get to know which tokens are padding, which the losses of routers need."""
    head_is_detached: bool
    """Whether the head's loss has no gradient for the parameters outside the head."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None,
        *,
        pictures: Pictures | None = None,
        **options: Any,  # noqa: ANN401  # megatron-core's
    ) -> Tensor:
        """Compute the stage. pictures: of the sequences, for a stage with a tower; for the other arguments, see `inputs`."""
        if self.embeds_pictures:
            options["decoder_input"] = self._embedded(input_ids, position_ids, pictures)
        hidden: Tensor = super().forward(input_ids, position_ids, attention_mask, **options)
        return hidden

    @property
    def embeds_pictures(self) -> bool:
        """Whether the stage computes the features of pictures."""
        return self.reads_pictures and self.visual is not None

    def _embedded(self, input_ids: Tensor, position_ids: Tensor, pictures: Pictures | None) -> Tensor:
        """Return the first layer's input: the embeddings of tokens, with the features of pictures in their places."""
        embedded: Tensor = self.embedding(input_ids, position_ids)  # (s, b, channels), whole on every rank
        if pictures is not None:
            by_sequence = vision.with_features(embedded.transpose(0, 1), self.visual, pictures)
            embedded = by_sequence.transpose(0, 1).contiguous()  # what stages exchange has to be contiguous
        if self.config.sequence_parallel:
            # A part would keep the whole in memory until the backward pass.
            embedded = scatter_to_sequence_parallel_region(embedded, group=self.pg_collection.tp).clone()
        return embedded

    def _postprocess(
        self, hidden_states: Tensor, input_ids: Tensor, position_ids: Tensor, rotary_pos_emb: Tensor, **_: object
    ) -> Tensor:
        if not self._computes_head:
            return hidden_states
        # megatron-core gives position p the embedding of token p + 1. The last position gets token 0: nothing is predicted there.
        of_both: Tensor = self.mtp(
            input_ids=input_ids,
            position_ids=position_ids,
            # The leaf requires a gradient: the head's activations are computed again only for an input that does.
            hidden_states=hidden_states.detach().requires_grad_() if self.head_is_detached else hidden_states,
            attention_mask=None,
            rotary_pos_emb=rotary_pos_emb,
            embedding=self._detached_embedding if self.head_is_detached else self.embedding,
        )
        if self.head_is_detached:  # what comes first is then without gradient
            of_both = torch.cat((hidden_states, of_both[len(hidden_states) :]))
        return of_both

    def _detached_embedding(self, **inputs: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(**inputs)
        return embedded.detach()

    @property
    def _computes_head(self) -> bool:
        return bool(self.mtp_process) and torch.is_grad_enabled()

    def of_model_and_head(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Divide the result of a call of the model's last stage into the hidden states of the model and those of the head,
        which are None if the call did not compute the head.
        """
        if not self._computes_head:
            return hidden, None
        of_model, of_head = hidden.chunk(2)
        return of_model, of_head

    def inputs(self, micro: MicroBatch) -> dict[str, Any]:
        """Return the arguments of a call of this model for the padded sequences of `micro`.

        Tokens are (b, s) int64, b sequences of s tokens. Positions are (b, s), or (3, b, s) if sequences may have
        pictures: in time, height and width. s is rounded up to a multiple of the number of tensor-parallel
        ranks; padding on the right does not affect the tokens before it. The call returns (s, b, channels); with sequence
        parallelism, each rank gets its part of the s tokens.
        """
        tokens = micro.inputs.tokens
        padding = -tokens.shape[1] % self.config.tensor_model_parallel_size
        tokens = F.pad(tokens, (0, padding))
        columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        inputs: dict[str, Any] = {"input_ids": tokens, "position_ids": columns, "attention_mask": None}
        if self.reads_pictures:
            inputs["position_ids"] = F.pad(micro.inputs.positions[..., 1:].movedim(-1, 0), (0, padding))
        if self.embeds_pictures:
            inputs["pictures"] = micro.inputs.pictures
        if self.masks_padding:
            mask = columns >= micro.lengths.unsqueeze(1)
            # megatron-core takes this rank's columns of the mask itself, but only where it embeds tokens.
            embeds = self.pre_process and not self.embeds_pictures
            inputs["padding_mask"] = mask if embeds else self._of_rank(mask)
        if (choices := micro.inputs.choices) is not None:
            inputs["extra_block_kwargs"] = {REPLAYED: self._by_layer(choices, padding)}
        return inputs

    def _by_layer(self, choices: Tensor, padding: int) -> LayerChoices:
        """Return the experts that this rank's layers compute.

        choices: (b, s - padding, layers of the whole model, k). padding: number of further tokens, for which routers choose.
        """
        numbers = [layer.layer_number for layer in self.decoder.layers]
        of_stage = choices[:, :, numbers[0] - 1 : numbers[-1]]
        own = self._of_rank(F.pad(of_stage, (0, 0, 0, 0, 0, padding), value=NO_CHOICE))
        return dict(zip(numbers, own.permute(2, 1, 0, 3).contiguous(), strict=True))

    def _of_rank(self, table: Tensor) -> Tensor:
        """Return the columns of the tokens that this rank's layers get. table: (b, s, …)."""
        if not self.config.sequence_parallel:
            return table
        group = self.pg_collection.tp
        return table.chunk(group.size(), dim=1)[group.rank()]

    def scores(
        self, hidden: Tensor, micro: MicroBatch, temperature: float, *, with_entropy: bool, float32_logits: bool
    ) -> TokenScores:
        """Compute log-probs, and entropies if `with_entropy`, of the trained tokens of `micro`, as tables (samples, response
        tokens).

        hidden: the result of a call with the arguments from `inputs`. Collective over the tensor-parallel ranks of the
        last stage, all of which get the scores.
        """
        sequences, positions = micro.rows // micro.inputs.tokens.shape[1], micro.rows % micro.inputs.tokens.shape[1]
        scores = vocabulary_parallel.token_scores(
            self._whole(hidden)[positions, sequences],
            self._output_weight,
            micro.targets,
            temperature,
            self.pg_collection.tp,
            vocabulary=self.vocabulary,
            with_entropy=with_entropy,
            float32_logits=float32_logits,
            kept=micro.kept,
        )
        entropy = None if scores.entropy is None else micro.table(scores.entropy)
        return TokenScores(micro.table(scores.log_probs), entropy)

    def log_probs_of_head(self, hidden: Tensor, micro: MicroBatch, *, float32_logits: bool) -> Tensor:
        """Return the head's log-probs of the trained tokens of `micro`, as a table (samples, response tokens).

        The head predicts a token two positions before it, so it never predicts the second token of a sequence: a trained one,
        which follows a prompt of one token, has 0. Rows never leave their sequence.

        hidden: the head's hidden states, from `of_model_and_head`. Collective over the tensor-parallel ranks, like `scores`.
        """
        sequences, positions = micro.rows // micro.inputs.tokens.shape[1], micro.rows % micro.inputs.tokens.shape[1]
        weight = self._output_weight
        # Every rank computes a row for every token: ranks that share experts must run the same backward passes.
        scores = vocabulary_parallel.token_scores(
            self._whole(hidden)[(positions - 1).clamp(min=0), sequences],
            weight.detach() if self.head_is_detached else weight,
            micro.targets,
            1.0,
            self.pg_collection.tp,
            vocabulary=self.vocabulary,
            with_entropy=False,
            float32_logits=float32_logits,
            kept=None,
        )
        return micro.table(scores.log_probs * (positions > 0))

    def _whole(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of all positions, (s, b, channels), on every tensor-parallel rank."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            # Its gradient is summed over the ranks.
            return gather_from_sequence_parallel_region(hidden, group=group)
        return copy_to_tensor_model_parallel_region(hidden, group=group)

    @property
    def _output_weight(self) -> Tensor:
        weight: Tensor = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        return weight


def build_stages(
    model: HFModule,
    layout: Layout,
    precision: torch.dtype,
    *,
    recompute: bool = False,
    router_losses: RouterLosses | None = None,
    head: MultiTokenPredictionSpec | None = None,
    overrides: Mapping[str, SettingValue] | None = None,
    reads_pictures: bool = False,
) -> list[StageModel]:
    """Build this rank's pipeline stage without loading weights, and return the list of its virtual stages.

    By default, a pipeline stage has one virtual stage. megatron-core's model-parallel process groups must exist.

    model: the model in transformers, on any device. recompute: whether the backward pass computes the activations
    of each layer again. router_losses: where the routers add their losses; None: they have none. head: settings of the head for
    multi-token prediction, which the last stage then has; None: the model has no head. overrides: further settings of
    megatron-core. reads_pictures: whether sequences may have pictures; otherwise a vision tower does not train.
    """
    config = transformer_config(
        text_part(model.config), layout, precision, recompute=recompute, with_head=head is not None, overrides=overrides
    )
    numbers: Sequence[int | None] = [None] if layout.virtual == 1 else range(layout.virtual)
    reads_pictures = reads_pictures and hasattr(model.model, "visual")
    stages = [
        _build_stage(text_part(model.config), config, number, router_losses, reads_pictures=reads_pictures)
        for number in numbers
    ]
    for stage in stages:
        stage.head_is_detached = head is not None and head.detached
        if stage.pre_process:
            stage.visual = tower_of(model, precision, trains=reads_pictures, recompute=recompute)
    return stages


def _build_stage(
    model: HFConfig,
    config: TransformerConfig,
    virtual_stage: int | None,
    router_losses: RouterLosses | None,
    *,
    reads_pictures: bool,
) -> StageModel:
    rotary = model.rope_parameters
    stage = StageModel(
        config,
        stage_layers(config, layer_types(model), virtual_stage, router_losses),
        vocab_size=model.vocab_size + -model.vocab_size % config.tensor_model_parallel_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type="mrope" if reads_pictures else "rope",
        rotary_percent=rotary.get("partial_rotary_factor", 1.0),
        rotary_base=rotary["rope_theta"],
        scatter_embedding_sequence_parallel=not reads_pictures,
        mtp_block_spec=head_layers(config) if config.mtp_num_layers else None,
        vp_stage=virtual_stage,
    )
    if reads_pictures:
        stage.rotary_pos_emb = PictureRotary(model)
    stage.visual, stage.reads_pictures = None, reads_pictures
    stage.vocabulary = model.vocab_size
    stage.masks_padding = router_losses is not None
    _mark_experts(stage)
    return stage.to(torch.cuda.current_device())


def _mark_experts(stage: StageModel) -> None:
    """Mark the parameters of experts, so that their gradients are summed over the ranks that hold the same experts.

    megatron-core 0.18 takes them for dense parameters if experts are not divided (`expert` is 1) and have another
    tensor parallelism than dense layers. Their gradients would then be wrong. 0.19 marks them itself.
    """
    config = stage.config
    if (
        config.expert_model_parallel_size == 1
        and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
    ):
        return
    for name, parameter in stage.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
