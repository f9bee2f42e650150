import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError

from qwen35_trainer.manifest import AlgorithmSpec, Manifest, TrainingSpec, fields
from qwen35_trainer.manifest.base import Section


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in fields.fields(model).items():
        inside = fields.item(field.annotation) or field.annotation
        if (part := fields.section(inside)) is not None:
            yield from sections(part, f"{path}.{name}")


FIELDS = [
    (f"{path}.{name}", field) for path, model in sections(Manifest) for name, field in fields.fields(model).items()
]


@pytest.mark.parametrize(("path", "field"), FIELDS, ids=[path for path, _ in FIELDS])
def test_every_field_says_what_it_is_and_which_key_of_verl_it_is(path, field):
    assert re.fullmatch(r"[A-Za-z].+\. verl: [^ ].*\.", field.description or "", re.DOTALL), field.description


@pytest.mark.parametrize(("path", "model"), list(sections(Manifest)))
def test_every_section_is_frozen_and_refuses_unknown_keys(path, model):
    assert issubclass(model, Section)
    assert model.model_config["frozen"]
    assert model.model_config["extra"] == "forbid"
    assert model.__doc__


def test_a_parsed_spec_cannot_be_changed(document):
    spec = TrainingSpec.model_validate(document()["spec"])
    with pytest.raises(ValidationError, match="frozen"):
        spec.seed = 3


def test_an_integer_is_a_valid_number_and_a_text_is_not_an_integer(document):
    assert (
        TrainingSpec.model_validate(document({"async.stalenessThreshold": 1})["spec"]).async_.stalenessThreshold == 1.0
    )
    with pytest.raises(ValidationError):
        TrainingSpec.model_validate(document({"seed": "3"})["spec"])
    with pytest.raises(ValidationError):
        TrainingSpec.model_validate(document({"seed": True})["spec"])


def test_python_code_may_use_either_spelling_of_a_keyword():
    assert AlgorithmSpec(lambda_=0.5) == AlgorithmSpec.model_validate({"lambda": 0.5})


@pytest.mark.processes
def test_the_spec_imports_without_torch_ray_vllm_or_kubernetes():
    program = (
        "import sys, qwen35_trainer.manifest\n"
        "print(sorted({'torch', 'ray', 'vllm', 'kubernetes', 'kopf', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
