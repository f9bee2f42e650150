"""What the chart renders, by Helm itself."""

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testbed import binaries

CHART = Path(__file__).parents[2] / "helm" / "qwen35-operator"
NAMESPACE = "qwen35-system"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The definition has thousands of lines, and the loader in C is ten times as fast."""

type Objects = list[dict[str, Any]]
type Render = Callable[..., Objects]


class Refused(Exception):
    """Helm would not render; says why."""


@pytest.fixture(scope="session")
def render() -> Render:
    """render("replicas=2") are the objects of a release called `demo`, rendered once per values: read them only. Raises Refused.

    chart: the folder of a changed copy of the chart.
    """
    helm = binaries.find()["helm"]

    @cache
    def rendered(changes: tuple[str, ...], release: str, chart: Path) -> Objects:
        options = [option for change in changes for option in ("--set-json", change)]
        command = [helm, "template", release, chart, "--namespace", NAMESPACE, "--kube-version", "1.35.4", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(done.stderr)
        return [document for document in yaml.load_all(done.stdout, Loader=LOADER) if document]

    def objects(*changes: str, release: str = "demo", chart: Path = CHART) -> Objects:
        return list(rendered(changes, release, chart))

    return objects
