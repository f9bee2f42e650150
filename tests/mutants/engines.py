"""Mistakes in an update: what it computes, what it divides by, which weights it steps, and what it keeps of them."""

from functools import partial

from tests.mutants.mutant import Mutant

mutant = partial(
    Mutant,
    folders=("tests/engines", "tests/gpu", "tests/distributed", "tests/pipeline", "tests/rollout", "tests/runtime"),
)

PARITY = "tests/distributed/test_parity.py::test_updates_are_those_of_a_plain_loop[1 process, micro-batch 2-dense]"
TRAINED = "trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}"
NAMED = TRAINED.removesuffix("}") + " and "

ENGINES = (
    mutant(
        name="The output layer is never stepped.",
        file="trainer/qwen35_trainer/engines/fsdp/optimizer.py",
        old=TRAINED,
        new=NAMED + '"lm_head" not in name}',
        killer=PARITY,
    ),
    mutant(
        name="One decoder layer is never stepped.",
        file="trainer/qwen35_trainer/engines/fsdp/optimizer.py",
        old=TRAINED,
        new=NAMED + '".layers.1." not in name}',
        killer=PARITY,
    ),
    mutant(
        name="Every step has learning rate 0.",
        file="trainer/qwen35_trainer/engines/fsdp/engine.py",
        old="self._optimizers.step(learning_rate)",
        new="self._optimizers.step(0.0)",
        killer=PARITY,
    ),
    mutant(
        name="The weight decay of the spec does not reach AdamW, which has a default of its own.",
        file="trainer/qwen35_trainer/engines/fsdp/optimizer.py",
        old='[{"params": members, "weight_decay": decay} for (decay, _), members in groups.items()]',
        new='[{"params": members} for members in groups.values()]',
        killer="tests/engines/fsdp/test_step.py::test_two_steps_are_those_of_clipped_adamw_with_its_decay",
    ),
    mutant(
        name="The norm of the gradients is measured, and they are not clipped.",
        file="trainer/qwen35_trainer/engines/fsdp/engine.py",
        old="gradient_norm.clip(trained, train.optimizer.gradientClip, copies=train.parallelism.copies)",
        new='gradient_norm.clip(trained, float("inf"), copies=train.parallelism.copies)',
        killer="tests/engines/fsdp/test_step.py::test_two_steps_are_those_of_clipped_adamw_with_its_decay",
    ),
    mutant(
        name="The weights that the optimizer steps are kept in bfloat16.",
        file="trainer/qwen35_trainer/engines/fsdp/engine.py",
        old="        convert_frozen(model, precision)\n",
        new="        convert_frozen(model, precision)\n        model.to(precision)\n",
        killer="tests/engines/fsdp/test_step.py::test_steps_too_small_for_bfloat16_add_up_in_a_bfloat16_model",
    ),
    mutant(
        name="Several ranks step by the mean of their gradients, where the loss is a share of a sum.",
        file="trainer/qwen35_trainer/engines/fsdp/engine.py",
        old="(loss * self._ranks.world).backward()",
        new="loss.backward()",
        killer="tests/distributed/test_fsdp.py::test_two_ranks_make_the_policy_update_that_one_makes[dense]",
    ),
    mutant(
        name="Each token is scored by the output at its own position, which has seen it.",
        file="trainer/qwen35_trainer/engines/micro_batch.py",
        old="starts[row] + batch.prompt_lengths[samples][row] - 1 + column",
        new="starts[row] + np.minimum(batch.prompt_lengths[samples][row] + column, lengths[row] - 1)",
        killer="tests/engines/test_micro_batch.py::test_trained_tokens_alone_are_scored_at_the_position_before_them",
    ),
    mutant(
        name="Freezing the embeddings leaves the output layer to train.",
        file="trainer/qwen35_trainer/engines/fsdp/freezing.py",
        old="return [text.embed_tokens, model.lm_head]",
        new="return [text.embed_tokens]",
        killer="tests/engines/fsdp/test_freezing.py::test_frozen_parts_stay_as_they_are_and_the_rest_trains",
    ),
    mutant(
        name="A checkpoint before the first update makes Adam's bias correction count a step that was none.",
        file="trainer/qwen35_trainer/engines/fsdp/sharded_checkpoint.py",
        old='                state["step"].zero_()\n',
        new='                state["step"].clone().zero_()\n',
        killer="tests/engines/fsdp/test_sharded_checkpoint.py::test_a_checkpoint_before_the_first_update_changes_no_update",
    ),
)
