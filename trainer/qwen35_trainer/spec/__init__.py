"""The training spec: what a manifest may say, what it defaults to, and what is wrong with it."""

from qwen35_trainer.spec.accelerator import Accelerator
from qwen35_trainer.spec.algorithm import KL, Algorithm, Correction, Loss
from qwen35_trainer.spec.asynchrony import Async
from qwen35_trainer.spec.checkpoint import Checkpoint, CheckpointStorage
from qwen35_trainer.spec.checks import check
from qwen35_trainer.spec.data import Data, Files, Gym, Source
from qwen35_trainer.spec.evaluation import Evaluation
from qwen35_trainer.spec.failure import FailurePolicy, FailureRule
from qwen35_trainer.spec.load import dump_manifest, load_manifest
from qwen35_trainer.spec.manifest import API_VERSION, KIND, Manifest, Metadata
from qwen35_trainer.spec.model import Model, ModelSource, RandomModel, RandomVision
from qwen35_trainer.spec.overrides import apply_overrides
from qwen35_trainer.spec.parse import parse_manifest, parse_spec
from qwen35_trainer.spec.problems import ManifestError, Problem
from qwen35_trainer.spec.release import cannot_run
from qwen35_trainer.spec.rewards import Reward
from qwen35_trainer.spec.rollout import Lane, Rollout
from qwen35_trainer.spec.tracking import Tracking
from qwen35_trainer.spec.train import Batch, LoRA, Offload, Optimizer, Parallelism, Part, Train
from qwen35_trainer.spec.training import TrainingSpec
from qwen35_trainer.spec.weights import Weights

__all__ = [
    "API_VERSION",
    "KIND",
    "KL",
    "Accelerator",
    "Algorithm",
    "Async",
    "Batch",
    "Checkpoint",
    "CheckpointStorage",
    "Correction",
    "Data",
    "Evaluation",
    "FailurePolicy",
    "FailureRule",
    "Files",
    "Gym",
    "Lane",
    "LoRA",
    "Loss",
    "Manifest",
    "ManifestError",
    "Metadata",
    "Model",
    "ModelSource",
    "Offload",
    "Optimizer",
    "Parallelism",
    "Part",
    "Problem",
    "RandomModel",
    "RandomVision",
    "Reward",
    "Rollout",
    "Source",
    "Tracking",
    "Train",
    "TrainingSpec",
    "Weights",
    "apply_overrides",
    "cannot_run",
    "check",
    "dump_manifest",
    "load_manifest",
    "parse_manifest",
    "parse_spec",
]
