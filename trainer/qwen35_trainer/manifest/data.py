"""spec.data: the prompts."""

from typing import Annotated, Literal

from pydantic import Field

from qwen35_trainer.manifest.base import PathName, PersistentVolumeClaimSpec, Section

FileFormat = Literal["JSONLines", "Parquet"]
Overlong = Literal["Error", "Skip", "TruncateLeft", "TruncateRight", "TruncateMiddle"]
GymValue = Annotated[str, Field(max_length=1024)] | int | float | bool


class FileVolumeSpec(Section):
    """The volume that holds the files of prompts."""

    persistentVolumeClaim: PersistentVolumeClaimSpec = Field(
        description="PersistentVolumeClaim whose folder the paths are relative to. No default. verl: none."
    )


class FilesSpec(Section):
    """Prompts that are read from files, one per row."""

    paths: tuple[PathName, ...] = Field(
        strict=False,
        min_length=1,
        max_length=256,
        description="Files, read in this order. Paths are relative to the volume or, without one, to the manifest. No"
        " default. verl: data.train_files, data.val_files.",
    )
    format: FileFormat | None = Field(
        None,
        description="Format of all the files. Default: by extension, .jsonl or .parquet. verl: none (Parquet is "
        "assumed).",
    )
    promptField: str = Field(
        "prompt",
        min_length=1,
        max_length=128,
        description="Column that holds the prompt: a string or a list of chat messages. Default prompt, the usual "
        "name. verl: data.prompt_key, data.messages_key.",
    )
    answerField: str = Field(
        "answer",
        min_length=1,
        max_length=128,
        description="Column that holds the reference answer, for rewards and SFT. Default answer, the usual name. "
        "verl: data.reward_fn_key, reward_model.ground_truth.",
    )
    imagesField: str = Field(
        "images",
        min_length=1,
        max_length=128,
        description="Column that holds a row's images, in the order of their placeholders in the messages. Rows may "
        "omit it. Default images, the usual name. verl: data.image_key.",
    )
    videosField: str = Field(
        "videos",
        min_length=1,
        max_length=128,
        description="Column that holds a row's videos, each as its frames and its frames per second. Rows may omit "
        "it. Default videos, the usual name. verl: data.video_key.",
    )
    toolsField: str = Field(
        "tools",
        min_length=1,
        max_length=128,
        description="Column that holds the tools that the messages may call, as JSON schemas. Rows may omit it. "
        "Default tools, the usual name. verl: data.tools_key.",
    )
    volume: FileVolumeSpec | None = Field(
        None,
        description="Volume that contains the paths. Default: none; the files are on every node, or next to the "
        "manifest. verl: none.",
    )


class GymSpec(Section):
    """Prompts that a reasoning-gym task generates and scores."""

    task: str = Field(
        min_length=1,
        max_length=128,
        pattern=r"^[a-z0-9_]+$",
        description="Name of the reasoning-gym task, such as basic_arithmetic. No default. verl: none.",
    )
    size: int = Field(
        ge=1,
        le=100_000_000,
        description="Number of prompts. No default, because it decides the length of an epoch. verl: none.",
    )
    seed: int = Field(
        0, ge=0, le=2**31 - 1, description="Seed of the task; equal seeds give equal prompts. Default 0. verl: none."
    )
    config: dict[Annotated[str, Field(min_length=1, max_length=128)], GymValue] = Field(
        default_factory=dict,
        max_length=64,
        description="Options of the task, under reasoning-gym's names. Default: those of the task. verl: none.",
    )


class SourceSpec(Section):
    """One set of prompts: exactly one of files and gym."""

    name: str = Field(
        min_length=1,
        max_length=63,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
        description="Name of the source, unique in its list; it is part of the id of every prompt and of the names of"
        " metrics. No default. verl: data_source (a column).",
    )
    files: FilesSpec | None = Field(None, description="Read prompts from files. No default. verl: data.train_files.")
    gym: GymSpec | None = Field(None, description="Generate prompts with a reasoning-gym task. No default. verl: none.")


class ChatTemplateSpec(Section):
    """The chat template, which turns messages into text in prompts, examples and the turns of a conversation."""

    thinking: bool | None = Field(
        None,
        description="Whether the assistant's turn opens with reasoning; passed to the template as enable_thinking. "
        "Default: the template decides (Qwen3.5 templates enable it for models of 4B parameters and "
        "larger). verl: data.apply_chat_template_kwargs.",
    )
    file: PathName | None = Field(
        None,
        description="Jinja file that replaces the tokenizer's chat template, relative to the manifest. Default: the "
        "tokenizer's own template. verl: actor_rollout_ref.model.custom_chat_template.",
    )


class DataSpec(Section):
    """The prompts to train on and the held-out prompts to evaluate."""

    train: tuple[SourceSpec, ...] = Field(
        strict=False,
        min_length=1,
        max_length=32,
        description="Sources to train on; together they are one set. No default. verl: data.train_files.",
    )
    validation: tuple[SourceSpec, ...] = Field(
        (),
        strict=False,
        max_length=32,
        description="Held-out sources, which are only evaluated. Default: empty, which means no evaluation. verl: "
        "data.val_files.",
    )
    maxPromptTokens: int = Field(
        1024,
        ge=1,
        le=1_048_576,
        description="Maximum length of a prompt, in tokens after the chat template is applied. Default 1024, as in "
        "the published recipes. verl: data.max_prompt_length.",
    )
    maxResponseTokens: int = Field(
        2048,
        ge=1,
        le=1_048_576,
        description="Maximum length of a response, in tokens; generation stops there. Default 2048, as in the "
        "published recipes. verl: data.max_response_length.",
    )
    overlongPrompts: Overlong = Field(
        "Error",
        description="What to do with prompts longer than maxPromptTokens, and in SFT with examples longer than both "
        "limits together: refuse the data, skip them, or cut them at the left, at the right or in the "
        "middle. Skipped and cut prompts are counted. Default Error, so that no data is lost unnoticed. "
        "verl: data.filter_overlong_prompts, data.truncation.",
    )
    chatTemplate: ChatTemplateSpec = Field(
        ChatTemplateSpec(),
        description="How messages become text. Default: the tokenizer's own template. verl: "
        "data.apply_chat_template_kwargs.",
    )
    shuffle: bool = Field(
        True,
        description="Visit the prompts in a new order in each epoch, computed from spec.seed. Default true, so that "
        "sources mix. verl: data.shuffle.",
    )
    epochs: int = Field(
        1,
        ge=1,
        le=100_000,
        description="How many times each prompt is trained on; it decides the length of the run unless train.updates "
        "is set. Default 1. verl: trainer.total_epochs.",
    )
