"""The libraries of profile Ascend are loaded in the order in which they work, in a worker's process; other orders are refused by name."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist

from qwen35_trainer.engines import accelerator_libraries
from qwen35_trainer.engines.accelerator_libraries import LibrariesUnusable
from qwen35_trainer.manifest import TrainingSpec, parse_spec
from tests.distributed.samples import spec_of
from tests.forks.start import REPOSITORY, start
from tests.patience import PATIENCE

ADAPTOR = accelerator_libraries.ADAPTOR
RAY = ["--node-ip-address=10.0.0.1", "--tensor-model-parallel-size=8"]
"""Arguments of a worker's process. MindSpeed would take both for settings."""


def spec_with(
    profile: str = "Ascend", engine: str = "Megatron", overrides: dict[str, object] | None = None, **degrees: int
) -> TrainingSpec:
    wanted = spec_of(max(1, *degrees.values()) if degrees else 1)
    wanted["accelerator"] |= {"profile": profile}
    wanted["train"] |= {"engine": engine, "parallelism": degrees, "overrideTransformerConfig": overrides or {}}
    spec, problems = parse_spec(wanted)
    assert spec is not None, problems
    return spec


@pytest.fixture
def imported(monkeypatch):
    """Names of the modules that `load` imports, in order; they are empty, and the adaptor records the settings of `repatch`.

    No library of the accelerator has been imported yet, and no group exists.
    """
    names: list[object] = []

    def import_module(name: str) -> ModuleType:
        names.append(name)
        module = ModuleType(name)
        module.repatch = names.append  # type: ignore[attr-defined]
        return module

    for name in ("torch_npu", "mindspeed", ADAPTOR, "megatron.core", "megatron.core.parallel_state"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(accelerator_libraries, "import_module", import_module)
    monkeypatch.setattr(accelerator_libraries, "_applied", None)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    return names


def test_a_worker_applies_the_patches_of_the_run_before_it_forms_its_groups(tmp_path):
    arguments = ["-m", "tests.engines.megatron.ascend_worker", str(tmp_path), *RAY]
    with (tmp_path / "output").open("w+") as output:
        process = start(arguments, stdout=output, stderr=output, cwd=REPOSITORY)
        code = process.wait(PATIENCE)
        output.seek(0)
        lines = output.read().splitlines()
    assert code == 0, "\n".join(lines)
    [line] = [line for line in lines if line.startswith('{"steps"')]
    recorded = json.loads(line)
    settings = accelerator_libraries.mindspeed_settings(spec_with(overrides={"moe_shared_expert_overlap": True}))
    assert settings["moe_shared_expert_overlap"] is True
    assert recorded["steps"] == [
        ["torch_npu is imported", {"process group": False}],
        [
            "the adaptor is imported",
            {"command line": [], "torch_npu": True, "megatron.core": False, "process group": False},
        ],
        ["repatch", {"settings": settings, "process group": False}],
        ["the process group is formed", {}],
        ["the patched function forms the model-parallel groups", {"settings": settings}],
    ]
    assert recorded["words"] == RAY, "they are there again after the import"
    messages = recorded["messages"]
    assert messages["with a process group"].startswith("the process group exists already")
    assert messages["with model-parallel groups"].startswith("the model-parallel groups exist already")


def test_the_settings_are_those_of_the_run(imported):
    accelerator_libraries.load(spec_with(tensor=2, pipeline=2))
    libraries, settings = imported[:2], imported[2]
    assert libraries == ["torch_npu", ADAPTOR]
    assert settings == {
        "use_flash_attn": True,
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
    }


def test_the_patches_get_the_settings_of_the_manifest(imported):
    wanted = spec_with(overrides={"moe_shared_expert_overlap": True, "attention_backend": "auto"})
    accelerator_libraries.load(wanted)
    settings = imported[2]
    assert (settings["moe_shared_expert_overlap"], settings["attention_backend"]) == (True, "auto")
    accelerator_libraries.require_mindspeed(wanted)
    with pytest.raises(LibrariesUnusable, match="another run: moe_shared_expert_overlap True, not None, attention"):
        accelerator_libraries.require_mindspeed(spec_with())


@pytest.mark.parametrize(
    ("profile", "engine", "libraries"),
    [("Ascend", "FSDP", ["torch_npu"]), ("CPU", "Megatron", []), ("NVIDIA", "Megatron", []), ("NVIDIA", "FSDP", [])],
)
def test_each_profile_and_engine_loads_only_what_it_needs(imported, profile, engine, libraries):
    accelerator_libraries.load(spec_with(profile, engine))
    assert imported == libraries
    assert not accelerator_libraries.has_mindspeed()


def test_megatron_core_must_not_be_imported_before_the_adaptor(imported, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(LibrariesUnusable, match=r"megatron\.core was imported before mindspeed\.megatron_adaptor"):
        accelerator_libraries.load(spec_with())
    assert not accelerator_libraries.has_mindspeed()


def test_groups_that_exist_are_refused_before_the_patches(imported, monkeypatch):
    groups = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", groups)
    with pytest.raises(LibrariesUnusable, match="the model-parallel groups exist already"):
        accelerator_libraries.load(spec_with())
    assert imported == ["torch_npu", ADAPTOR]


def test_groups_are_refused_without_the_patches_or_with_those_of_another_run(imported):
    wanted = spec_with()
    with pytest.raises(LibrariesUnusable, match="would be formed before MindSpeed's patches are applied"):
        accelerator_libraries.require_mindspeed(wanted)
    accelerator_libraries.load(spec_with(tensor=2))
    with pytest.raises(
        LibrariesUnusable, match="another run: tensor_model_parallel_size 2, not 1, sequence_parallel True"
    ):
        accelerator_libraries.require_mindspeed(wanted)
    accelerator_libraries.load(wanted)
    accelerator_libraries.require_mindspeed(wanted)


@pytest.mark.parametrize("profile", ["CPU", "NVIDIA"])
def test_other_profiles_need_no_patches(imported, profile):
    accelerator_libraries.require_mindspeed(spec_with(profile))


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (
            "torch_npu",
            r"torch_npu, which accelerator\.profile Ascend needs, cannot be imported: .*trainer-ascend-arm64",
        ),
        (
            ADAPTOR,
            r"mindspeed\.megatron_adaptor, which train\.engine Megatron .* cannot be imported: .*Install MindSpeed",
        ),
    ],
)
@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named it"), OSError("libhccl.so: cannot open")])
def test_a_library_that_cannot_be_imported_is_named_with_the_fix(imported, monkeypatch, library, message, error):
    def import_module(name: str) -> ModuleType:
        if name == library:
            raise error
        return ModuleType(name)

    monkeypatch.setattr(accelerator_libraries, "import_module", import_module)
    with pytest.raises(LibrariesUnusable, match=message) as refusal:
        accelerator_libraries.load(spec_with())
    assert str(error) in str(refusal.value)
