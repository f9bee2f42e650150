"""Reads what `qwen35 plan` needs: the manifest, config.json of the model, and the records of an earlier run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from qwen35_trainer.catalog.devices import DEFAULT_DEVICES, DEVICES, DeviceName
from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.catalog.models import MODELS
from qwen35_trainer.manifest import Manifest, ManifestError, load_manifest
from qwen35_trainer.manifest.problems import did_you_mean
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.planning.known_sizes import known_sizes
from qwen35_trainer.planning.measured_run import MeasuredRun, NothingMeasured
from qwen35_trainer.planning.pod_request import PodRequest
from qwen35_trainer.planning.resource_plan import Inputs, ResourcePlan, resource_plan
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import UpdateRecord


class PlanRefused(Exception):
    """Raised if options of `qwen35 plan` cannot be used. The message has one line for each problem."""


class ModelUnknown(PlanRefused):
    """Raised if the sizes of the model are not known.

    Either its config.json is not that of a supported model, or this machine has no config.json of the
    model and the catalog does not have the model.
    """


def planned(
    file: Path,
    changes: Sequence[str] = (),
    *,
    device: str | None = None,
    mean: float | None = None,
    run: Path | None = None,
    pictures: bool = False,
) -> ResourcePlan:
    """Return the resource plan of the training in a manifest.

    changes: values of --set. device: name of a device in the catalog; None: the default of the manifest's profile.
    mean: mean tokens of a response. run: folder of an earlier run whose speeds are used. pictures: whether the data
    contain pictures. Raises ManifestError, ModelUnknown, or PlanRefused with every problem of the options.
    """
    manifest = load_manifest(file, list(changes))
    spec, problems = manifest.spec, list[str]()
    chosen = _device(spec, device, problems)
    measured = None if run is None else _measured(run, spec, problems)
    if mean is not None and not 1 <= mean <= spec.data.maxResponseTokens:
        problems.append(f"--mean {mean:g}: is not between 1 and data.maxResponseTokens {spec.data.maxResponseTokens}")
    if problems:
        raise PlanRefused("\n".join(problems))
    shape = _shape(manifest, file.parent)
    return resource_plan(spec, Inputs(shape, chosen, mean, pictures, _profile(spec), measured=measured))


def _device(spec: TrainingSpec, name: str | None, problems: list[str]) -> DeviceName | None:
    profile = spec.accelerator.profile
    if name is None:
        return DEFAULT_DEVICES.get(profile)
    names = {key.lower(): key for key in DEVICES}
    if (listed := names.get(name.lower())) is None:
        problems.append(f"--device {name}: is not in the catalog. {did_you_mean(name, DEVICES)}")
        return None
    if DEVICES[listed].profile != profile:
        suitable = ", ".join(key for key, value in DEVICES.items() if value.profile == profile) or "none: omit it"
        problems.append(f"--device {name}: the manifest's accelerator.profile is {profile}. Its devices: {suitable}.")
    return listed


def _shape(manifest: Manifest, base: Path) -> ModelSizes:
    """Return the sizes of the model from its config.json if the file is on this machine,
    otherwise from the manifest or the catalog.
    """
    model = manifest.spec.model
    if model.source.path is not None and (config := base / model.source.path / "config.json").is_file():
        try:
            return ModelSizes.of_config(json.loads(config.read_text(encoding="utf-8")))
        except (KeyError, TypeError, ValueError) as error:
            text = f"{config}: {type(error).__name__} {error}; it is not the config.json of a Qwen3.5 or Qwen3 model"
            raise ModelUnknown(text) from error
    if (shape := known_sizes(model)) is None:
        raise ModelUnknown(
            f"spec.model.name: {model.name} is not in the catalog, and no config.json is at spec.model.source. "
            f"{did_you_mean(model.name, MODELS)}"
        )
    return shape


def _measured(run: Path, spec: TrainingSpec, problems: list[str]) -> MeasuredRun | None:
    try:
        earlier = load_manifest(run / "run.yaml", []).spec
        measured = MeasuredRun.of(read_records(run / "metrics.jsonl").of(UpdateRecord), earlier)
    except (ManifestError, OSError, ValueError, NothingMeasured) as error:
        problems.append(f"--from {run}: {error}")
        return None
    for name, now, then in (
        ("model.name", spec.model.name, earlier.model.name),
        ("accelerator.profile", spec.accelerator.profile, earlier.accelerator.profile),
        ("train.engine", spec.train.engine, earlier.train.engine),
    ):
        if now != then:
            problems.append(
                f"--from {run}: its {name} is {then}, and the manifest's is {now}; speeds do not carry over"
            )
    return measured


def _profile(spec: TrainingSpec) -> PodRequest:
    """Return the memory that the device profile requests for a pod."""
    from qwen35_operator.device_profiles import PROFILES

    share, devices = PROFILES[spec.accelerator.profile].per_device, spec.accelerator.devicesPerNode
    return PodRequest(share.memory_gib * devices, share.shm_gib * devices)
