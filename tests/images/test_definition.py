"""Images are what the chart and the operator expect of them."""

import re

import pytest
import yaml

from images.bases import pinned
from images.definition import definition, names
from images.dockerfile import render
from images.layers import base_layers
from images.locks import files
from images.repository import REPOSITORY
from images.system import NotBuildable
from images.versions import versions
from qwen35_operator.desired import pod_templates
from qwen35_operator.operator_settings import IMAGES
from qwen35_trainer.contract.shared_names import EXAMPLES_FOLDER

CHART = REPOSITORY / "helm" / "qwen35-operator"


def test_the_operators_image_is_the_charts():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert definition("operator").name == values["image"]["repository"]
    assert values["podSecurityContext"]["runAsUser"] == definition("operator").user


TRAINERS = {"CPU": "trainer-cpu", "NVIDIA": "trainer-cuda", "Ascend": "trainer-ascend"}


def test_every_image_that_the_operator_names_is_defined():
    assert {profile: definition(name).tagged for profile, name in TRAINERS.items()} == IMAGES
    assert {definition(name).user for name in TRAINERS.values()} == {pod_templates.USER_ID}


def test_the_chart_takes_an_image_for_every_profile_and_by_default_the_operators():
    assert yaml.safe_load((CHART / "values.yaml").read_text())["trainerImages"] == dict.fromkeys(TRAINERS, "")


def test_relative_paths_of_a_manifest_are_found_in_the_trainers_images():
    for name in TRAINERS.values():
        assert definition(name).files["examples"] == EXAMPLES_FOLDER


def test_what_an_image_is_made_of_is_there_and_the_builder_gets_it():
    sent = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for image in map(definition, names()):
        for part in (*files(image), *image.files):
            assert (REPOSITORY / part).exists()
            assert part.partition("/")[0] in sent


def test_the_build_file_ends_as_an_ordinary_user():
    for image in map(definition, names()):
        assert f"\nUSER {image.user}:{image.user}\n" in render(image)


@pytest.mark.parametrize("image", names())
def test_the_build_file_is_current(image: str):
    assert (REPOSITORY / "images" / image / "Dockerfile").read_text() == render(definition(image))


def test_the_build_files_versions_are_those_of_the_table():
    table = versions().of("trainer-ascend")
    text = render(definition("trainer-ascend"))
    assert f"ARG BASE={pinned(f'quay.io/ascend/cann:{table["cann"]}-910b-ubuntu22.04-py{table["python"]}')}\n" in text
    assert f'"triton-ascend=={table["triton-ascend"]}$hashes"' in text
    assert f" VLLM_VERSION_OVERRIDE={table['vllm']} " in text


def test_the_build_file_installs_the_lock_of_the_architecture_that_it_is_built_for():
    for image in map(definition, ("trainer-cuda", "trainer-ascend")):
        (template,) = re.findall(r"--requirement /tmp/(requirements/\S+\$\{TARGETARCH\}\S+)", render(image))
        assert {template.replace("${TARGETARCH}", name): True for name in image.architectures}.keys() == set(
            image.locks.values()
        )


@pytest.mark.parametrize("image", ["trainer-cuda", "trainer-ascend"])
def test_an_image_that_no_machine_contains_is_refused_with_the_reason(image: str):
    with pytest.raises(NotBuildable, match=f"{image} needs a builder with a registry, because .*; use its Dockerfile"):
        base_layers(definition(image))
