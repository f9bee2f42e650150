"""Images are what the chart and the operator expect of them."""

import re

import yaml

from images.definition import REPOSITORY, definition, names
from images.dockerfile import render
from qwen35_operator.desired import pod_templates
from qwen35_operator.operator_settings import IMAGES
from qwen35_trainer.contract.shared_names import EXAMPLES_FOLDER

CHART = REPOSITORY / "helm" / "qwen35-operator"


def test_the_operators_image_is_the_charts():
    assert definition("operator").name == yaml.safe_load((CHART / "values.yaml").read_text())["image"]["repository"]
    deployment = (CHART / "templates" / "deployment.yaml").read_text()
    assert re.findall(r"runAsUser: (\d+)", deployment) == [str(definition("operator").user)]


def test_the_trainers_image_is_the_one_that_the_operator_names():
    assert definition("trainer-cpu").tagged == IMAGES["CPU"]
    assert definition("trainer-cpu").user == pod_templates.USER_ID


def test_relative_paths_of_a_manifest_are_found_in_the_trainers_image():
    assert definition("trainer-cpu").files["examples"] == EXAMPLES_FOLDER


def test_what_an_image_is_made_of_is_there_and_the_builder_gets_it():
    sent = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for image in map(definition, names()):
        for part in (image.requirements, *image.files):
            assert (REPOSITORY / part).exists()
            assert part.partition("/")[0] in sent


def test_the_build_file_ends_as_an_ordinary_user():
    for image in map(definition, names()):
        assert f"\nUSER {image.user}:{image.user}\n" in render(image)
