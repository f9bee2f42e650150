"""Reads and encodes the data of a run, before the driver and the workers start."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.encode import EncodedPrompts, encode_prompts
from qwen35_trainer.data.picture_reader import load_picture_reader
from qwen35_trainer.data.prompt import Prompt
from qwen35_trainer.data.prompt_set import PromptSet
from qwen35_trainer.data.sft import EncodedExamples, encode_examples
from qwen35_trainer.data.template import TemplateEncoder
from qwen35_trainer.data.tokenizer import load_tokenizer
from qwen35_trainer.manifest import Manifest, TrainingSpec
from qwen35_trainer.manifest.data import SourceSpec
from qwen35_trainer.rewards.response_decoder import ResponseDecoder
from qwen35_trainer.rewards.reward_settings import needs_answers
from qwen35_trainer.runtime.checkpoint_store import SavedCheckpoint
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.job import Job, RunData
from qwen35_trainer.runtime.process import starting
from qwen35_trainer.runtime.resuming import check_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@starting()
def prepare(
    manifest: Manifest,
    base: Path,
    folder: RunFolder,
    *,
    resume: SavedCheckpoint | None,
    started: float,
    in_cluster: bool = False,
) -> tuple[Job, RunData]:
    """Read and encode the data of a run. Returns the description of the run, and the data.

    base: the manifest's folder. folder: output folder of the run. resume: the checkpoint from which the run continues;
    None: it starts from the model. started: time at which the command began, in Unix seconds. in_cluster: whether the
    run uses the Ray of a cluster. Raises DataError with the problems of all sources together, and FolderRefused if the
    checkpoint is of a run with other rows.
    """
    spec = manifest.spec
    template = spec.data.chatTemplate
    tokenizer = load_tokenizer(spec.model, base, template.file)
    check_vocabulary(spec, base, len(tokenizer))
    stops = stop_tokens(spec, base, tokenizer)
    if resume is None:  # a run that has begun continues
        check_end_of_turn(spec, tokenizer, stops)
    reader = load_picture_reader(spec.model, base, tokenizer)
    supervised = spec.mode == "SFT"
    answers = not supervised and needs_answers(spec.rewards)
    limit, overlong = spec.data.maxPromptTokens, spec.data.overlongPrompts

    def read(sources: Sequence[SourceSpec]) -> PromptSet:
        return PromptSet.load(sources, base, answers_required=answers)

    def prompts_of(part: Sequence[Prompt]) -> EncodedPrompts:
        if supervised or not part:
            return EncodedPrompts(())
        return EncodedPrompts(encode_prompts(part, tokenizer, limit, overlong, template.thinking, reader))

    def examples_of(part: Sequence[Prompt]) -> EncodedExamples:
        if not supervised or not part:
            return EncodedExamples(())
        max_tokens = limit + spec.data.maxResponseTokens
        return EncodedExamples(
            encode_examples(part, tokenizer, max_tokens, overlong, thinking=template.thinking, reader=reader)
        )

    train, held_out_prompts = _both(read, spec.data.train, spec.data.validation)
    if resume is not None:
        check_rows(resume.path, train.source_rows, spec, in_cluster=in_cluster)
    validation = held_out_prompts[: spec.evaluation.maxPrompts]
    prompts, questions = _both(prompts_of, train, validation)
    examples, held_out = _both(examples_of, train, validation)
    if spec.train.engine == "Megatron" and held_out.have_pictures and not examples.have_pictures:
        raise DataError(
            [
                "spec.data.validation: examples have pictures, and none of spec.data.train has, so the Megatron engine does not compute "
                "the vision tower. Remove the pictures from validation, or set train.engine to FSDP."
            ]
        )
    job = Job(
        manifest=manifest,
        base=base,
        folder=folder,
        resume=resume,
        started=started,
        threads=threads(spec),
        in_cluster=in_cluster,
        source_rows=train.source_rows,
        updates_total=_updates(spec, len(examples) or len(prompts)),
        vocabulary=len(tokenizer),
        pictures=prompts.have_pictures or examples.have_pictures,
        end_token=int(tokenizer.eos_token_id),
        stop_tokens=stops,
        replicas_read_pictures=prompts.have_pictures or questions.have_pictures,
    )
    return job, RunData(ResponseDecoder.of(tokenizer), prompts, questions, examples, held_out)


def stop_tokens(spec: TrainingSpec, base: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens besides the tokenizer's end token at which a response ends when the published model is served.

    These are `eos_token_id` of generation_config.json in the folder `model.source.path`, as far as they are special tokens of
    the tokenizer. Without this file, or if it cannot be read, there are none. base: the manifest's folder.
    """
    if (path := spec.model.source.path) is None:
        return ()
    try:
        ends = json.loads((base / path / "generation_config.json").read_bytes())["eos_token_id"]
        named = set(ends if isinstance(ends, list) else [ends])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return tuple(sorted(named & special - {tokenizer.eos_token_id}))


def check_vocabulary(spec: TrainingSpec, base: Path, tokens: int) -> None:
    """Raise DataError if the model in the folder `model.source.path` has fewer embeddings than the tokenizer has tokens.

    Nothing is checked without such a folder, or if its config.json cannot be read. base: the manifest's folder. tokens:
    number of tokens of the tokenizer. More embeddings than tokens are usual, because published models round up.
    """
    if (path := spec.model.source.path) is None:
        return
    try:
        config = json.loads((base / path / "config.json").read_bytes())
        rows = config.get("text_config", config)["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # the train workers report what is wrong with the files
    if isinstance(rows, int) and tokens > rows:
        raise DataError(
            [
                f"spec.model.source.path: the tokenizer of {path} has {tokens} tokens, and the model has embeddings for {rows} "
                "(vocab_size in config.json). Use the tokenizer that was published with the model."
            ]
        )


def check_end_of_turn(spec: TrainingSpec, tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> None:
    """Raise DataError if the chat template ends an assistant's turn with a token that does not end a response.

    A response would continue after its turn. For example, tokenizers of base models have the end token <|endoftext|>, and a
    template that ends turns with <|im_end|>.

    stops: the tokens of `stop_tokens`, at which responses end too. A template that writes no special token after a turn is
    refused in SFT only, which would not teach the model to end a turn; in the other modes, the model chooses how to end.
    """
    encoder = TemplateEncoder(tokenizer, spec.data.chatTemplate.thinking)
    ending, end = encoder.turn_ending, str(tokenizer.eos_token)
    ends = {end, *map(str, tokenizer.convert_ids_to_tokens(list(stops)))}
    if ending is None or any(token in ending for token in ends):
        return
    written = encoder.end_token if encoder.end_token != end else None
    if written is None and spec.mode != "SFT":
        return
    fixes: list[str] = []
    if written is not None and spec.model.source.path is not None:
        number = tokenizer.convert_tokens_to_ids(written)
        fixes.append(f"add {number} ({written}) to eos_token_id in generation_config.json of {spec.model.source.path}")
    fixes.append(f"let the template end an assistant's turn with {end} (data.chatTemplate.file)")
    choice = ", or ".join(fixes)
    problem = (
        "the model would never learn to end a turn" if written is None else "a response would continue after its turn"
    )
    raise DataError(
        [
            f"the chat template ends an assistant's turn with {written or 'no special token'}, and the tokenizer's end token is "
            f"{end}: {problem}. {choice[0].upper()}{choice[1:]}."
        ]
    )


def _both[S, T](step: Callable[[S], T], train: S, validation: S) -> tuple[T, T]:
    """Apply `step` to the training data and to the validation data.

    If either fails, raises DataError with all problems.
    """
    problems: list[str] = []
    results: list[T] = []
    for part in (train, validation):
        try:
            results.append(step(part))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return results[0], results[1]


def started_at() -> float:
    """Return the time at which this process started, in Unix seconds, so that measured times include imports.

    Without the package psutil, the result is the present time.
    """
    try:
        import psutil

        return psutil.Process().create_time()
    except ImportError:
        return time.time()


def _updates(spec: TrainingSpec, examples: int) -> int:
    """Return the number of updates of the run, rounded down so that all batches are complete.

    examples: number of prompts or examples. Raises DataError if the run would not fill one batch.
    """
    wanted = spec.train.updates or examples * spec.data.epochs // spec.train.batch.promptsPerUpdate
    whole = wanted // spec.async_.updatesPerBatch * spec.async_.updatesPerBatch
    if whole == 0:
        needed = spec.groups_per_batch
        raise DataError(
            [
                f"{examples} prompts × {spec.data.epochs} epochs do not fill one batch of {needed}. "
                "Lower train.batch.promptsPerUpdate, raise data.epochs, or set train.updates."
            ]
        )
    return whole


def threads(spec: TrainingSpec) -> int:
    """Return the number of threads of each worker on this machine, at least 1.

    Workers that compute at the same time share the cores.
    """
    # Only Linux reports which cores this process may use.
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // workers_at_a_time(spec))


def workers_at_a_time(spec: TrainingSpec) -> int:
    """Return the number of workers that compute at the same time. A replica counts as one worker per device.

    In FullyAsync, both pools compute at the same time. In the other modes, the pools take turns or there is only one,
    so the larger pool counts.
    """
    rollout = spec.rollout_devices
    return spec.world_size + rollout if spec.mode == "FullyAsync" else max(spec.world_size, rollout)
