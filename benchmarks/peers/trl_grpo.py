"""TRL's GRPOTrainer on the benchmark's job: `python trl_grpo.py SETTINGS.json`, one JSON line per update on its trace.

    {"update": 3, "time": 9.1, "seconds": 0.4, "generating": 0.3, "tokens": 700, "reward": 0.1}
    {"update": 20, "time": 15.0, "accuracy": 0.2}

`time` is seconds since this process began, without those spent on evaluations; `generating` is the part of `seconds`
from the end of the previous update until the rewards are asked for. Everything else of an update counts as training.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Settings:
    """Settings of the peer, as JSON. Paths are strings."""

    model: str
    train: str
    validation: str
    trace: str
    updates: int
    prompts: int
    samples: int
    response_tokens: int
    learning_rate: float
    schedule: str
    extract: str
    """Regular expression of the first reward, as in our manifest."""
    evaluate_every: int
    micro_batch: int
    threads: int
    continuous_batching: bool = False


@dataclass
class Trace:
    """Appends records to the trace file. The clock is stopped during evaluations."""

    path: Path
    paused: float = 0.0
    tokens: int = 0
    reward: float = 0.0
    _began: float = field(default_factory=lambda: psutil.Process().create_time())
    _updated: float = 0.0
    _generated: float = 0.0

    @property
    def now(self) -> float:
        return time.time() - self._began - self.paused

    def start(self) -> None:
        self._updated = self.now

    def generated(self, tokens: int, reward: float) -> None:
        self._generated, self.tokens, self.reward = self.now, tokens, reward

    def updated(self, update: int) -> None:
        now = self.now
        self._write(
            update=update,
            time=now,
            seconds=now - self._updated,
            generating=self._generated - self._updated,
            tokens=self.tokens,
            reward=self.reward,
        )
        self._updated = now

    def evaluated(self, update: int, accuracy: float) -> None:
        self._write(update=update, time=self.now, accuracy=accuracy)

    def _write(self, **values: float) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def accuracy(
    model: Any,  # noqa: ANN401  # `generate` is declared as a tensor of the module
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, str]],
    tokens: int,
) -> float:
    """Return the share of prompts whose greedy response is exactly the answer."""
    import torch

    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, padding_side="left")
    width = inputs["input_ids"].shape[1]
    model.eval()
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=tokens,
            do_sample=False,
        )
    model.train()
    texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)


def config(settings: Settings) -> Any:  # noqa: ANN401  # TRL's configuration is untyped
    """Convert our manifest to TRL's configuration; features that cost time without training are off."""
    from trl.trainer.grpo_config import GRPOConfig

    return GRPOConfig(
        output_dir=str(Path(settings.trace).with_suffix(".output")),
        max_steps=settings.updates,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.prompts * settings.samples // settings.micro_batch,
        num_generations=settings.samples,
        max_completion_length=settings.response_tokens,
        temperature=1.0,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.schedule,
        warmup_steps=0,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        beta=0.0,
        loss_type="dapo",  # a mean over the update's tokens, our TokenMean
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="group",
        num_iterations=1,
        use_vllm=False,
        use_transformers_continuous_batching=settings.continuous_batching,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_num_workers=0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def train(settings: Settings) -> None:
    """Run the job and write its trace."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_trainer import GRPOTrainer

    torch.set_num_threads(settings.threads)
    trace = Trace(Path(settings.trace))
    digit = re.compile(settings.extract)
    held_out = _rows(settings.validation)

    def reward(
        completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: object
    ) -> list[float | None]:
        match_texts = (digit.search(text) for text in completions)
        values = [
            0.8 * (match is not None and match.group() == right) + 0.2 * (text.strip() == right)
            for match, text, right in zip(match_texts, completions, answer, strict=True)
        ]
        trace.generated(sum(map(len, completion_ids)), sum(values) / len(values))
        return [*values]

    class Record(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            trace.start()

        def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:  # noqa: ANN401
            trace.updated(state.global_step)
            if settings.evaluate_every and state.global_step % settings.evaluate_every == 0:
                began = time.time()
                right = accuracy(model, tokenizer, held_out, settings.response_tokens)
                trace.paused += time.time() - began
                trace.evaluated(state.global_step, right)

    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    GRPOTrainer(
        model=model,
        args=config(settings),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(_rows(settings.train)),
        processing_class=tokenizer,
        callbacks=[Record()],
    ).train()


def _rows(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    train(Settings(**json.loads(Path(sys.argv[1]).read_text())))
