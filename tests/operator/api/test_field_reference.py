import re
from pathlib import Path

from qwen35_operator.api import crd, field_reference

TEMPLATES = re.compile(r"spec\.pods\.(head|rollout|train)(\.|$)")
REPOSITORY = Path(__file__).parents[3]


def test_the_reference_in_the_repository_is_current():
    current = (REPOSITORY / "docs" / "reference" / "api.md").read_text()
    assert current == field_reference.text(), (
        "run: python -m qwen35_operator.api.field_reference > docs/reference/api.md"
    )


def test_every_field_has_a_row_and_every_section_a_heading():
    text = field_reference.text()
    for path, node in crd.fields(crd.schema()):
        if path.startswith(("spec", "status")) and path[-2:] not in {"[]", "{}"} and not TEMPLATES.match(path):
            assert f"| `{path.rsplit('.', 1)[-1]}` |" in text or path in {"spec", "status"}
            assert "properties" not in node or f"## {path}\n" in text


def test_the_typed_fields_of_pod_templates_have_rows():
    text = field_reference.text()
    assert text.count("[part of a pod template](#pod-templates)") == 3
    assert "| `spec.containers[].env[].value` | text | Value. |" in text
    assert "| `spec.topologySpreadConstraints` | list, merged by topologyKey and whenUnsatisfiable |" in text


def test_rows_have_as_many_cells_as_their_head():
    cells = None
    for line in field_reference.text().splitlines():
        columns = line.replace("\\|", "").count("|")
        if not line.startswith("|"):
            cells = None
        elif cells is None:
            cells = columns
        assert cells is None or columns == cells, line
