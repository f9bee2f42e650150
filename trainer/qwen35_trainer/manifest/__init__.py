"""The manifest of a training: its fields, their defaults, and the checks across fields."""

from qwen35_trainer.manifest.accelerator import AcceleratorSpec
from qwen35_trainer.manifest.algorithm import AlgorithmSpec, CorrectionSpec, KLSpec, LossSpec
from qwen35_trainer.manifest.asynchrony import AsyncSpec
from qwen35_trainer.manifest.checkpoint import CheckpointSpec, CheckpointStorageSpec
from qwen35_trainer.manifest.checks import check, check_new
from qwen35_trainer.manifest.data import DataSpec, FilesSpec, GymSpec, SourceSpec
from qwen35_trainer.manifest.evaluation import EvaluationSpec
from qwen35_trainer.manifest.failure import FailurePolicySpec, FailureRuleSpec
from qwen35_trainer.manifest.load import dump_manifest, load_manifest
from qwen35_trainer.manifest.model import ModelSourceSpec, ModelSpec, RandomModelSpec, RandomVisionSpec
from qwen35_trainer.manifest.overrides import apply_overrides
from qwen35_trainer.manifest.parse import parse_manifest, parse_spec, parse_stored_spec
from qwen35_trainer.manifest.problems import ManifestError, Problem
from qwen35_trainer.manifest.publication import PublicationSpec
from qwen35_trainer.manifest.release import cannot_run
from qwen35_trainer.manifest.resource import API_VERSION, KIND, Manifest, Metadata
from qwen35_trainer.manifest.rewards import RewardSpec
from qwen35_trainer.manifest.rollout import RolloutSpec, StragglerLaneSpec
from qwen35_trainer.manifest.tracking import TrackingSpec
from qwen35_trainer.manifest.train import (
    BatchSpec,
    FrozenPart,
    LoRASpec,
    OffloadSpec,
    OptimizerSpec,
    ParallelismSpec,
    TrainSpec,
)
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.manifest.vllm import VLLMSpec

__all__ = [
    "API_VERSION",
    "KIND",
    "AcceleratorSpec",
    "AlgorithmSpec",
    "AsyncSpec",
    "BatchSpec",
    "CheckpointSpec",
    "CheckpointStorageSpec",
    "CorrectionSpec",
    "DataSpec",
    "EvaluationSpec",
    "FailurePolicySpec",
    "FailureRuleSpec",
    "FilesSpec",
    "FrozenPart",
    "GymSpec",
    "KLSpec",
    "LoRASpec",
    "LossSpec",
    "Manifest",
    "ManifestError",
    "Metadata",
    "ModelSourceSpec",
    "ModelSpec",
    "OffloadSpec",
    "OptimizerSpec",
    "ParallelismSpec",
    "Problem",
    "PublicationSpec",
    "RandomModelSpec",
    "RandomVisionSpec",
    "RewardSpec",
    "RolloutSpec",
    "SourceSpec",
    "StragglerLaneSpec",
    "TrackingSpec",
    "TrainSpec",
    "TrainingSpec",
    "VLLMSpec",
    "apply_overrides",
    "cannot_run",
    "check",
    "check_new",
    "dump_manifest",
    "load_manifest",
    "parse_manifest",
    "parse_spec",
    "parse_stored_spec",
]
