"""Watches the engines of a command, whose processes are its own, and lets one of them fail when the test orders it.

    test: watch ──► PYTHONPATH with a sitecustomize ──► each Python of the command: install() ──► PATCHES of modules, once imported
      order ──────────────────────────────────────────► the first engine that comes to the method claims the order, and fails
      ◄────────────── claimed-PID, and the lines of `engines` and `trained`

    a line of `engines`     "receives", "commits" or "steps" (the first step), the process, the version
    a line of `trained`     the group, prompt and index of a trained sequence, and the versions of its tokens, as JSON

Commands without an order run as usual, except that a lost replica is replaced without a delay. They must not be forks, as in soak, because
a fork imports no sitecustomize.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.profiles import FORKED
from tests.rollout.older_processor import remove_instructions

FOLDER = "QWEN35_TESTS_WATCHED"
"""The environment variable with the folder of these files."""
REPOSITORY = Path(__file__).parents[2]
LEFT_BYTES, NEEDED_BYTES = 2**25, 2**26
"""Memory that the kernel still gives an engine that runs out of it, so that it can report that, and what the engine then needs."""


@dataclass(frozen=True)
class Trained:
    """A sequence of a trained batch."""

    group: int
    prompt: str
    index: int
    versions: list[int]
    """The version of each token."""


@dataclass(frozen=True)
class FirstStep:
    """The first step of an engine."""

    process: int
    version: int
    newest: int
    """The newest version that any engine had got until then."""


@dataclass(frozen=True)
class Watched:
    """The files of a command, for its test."""

    folder: Path

    def order(self, method: str, act: str) -> None:
        """Let the next engine that comes to the method fail. Replicas that have not loaded weights yet do not count."""
        for claimed in self.folder.glob("claimed-*"):
            claimed.unlink()
        written = self.folder / "written"
        written.write_text(f"{method} {act}")
        written.rename(self.folder / "order")

    @property
    def victim(self) -> int | None:
        """The process of the engine that has claimed the last order; None: no engine has."""
        return next((int(file.name.partition("-")[2]) for file in self.folder.glob("claimed-*")), None)

    @property
    def first_steps(self) -> list[FirstStep]:
        newest, steps = -1, list[FirstStep]()
        for event, process, version in self._events():
            newest = max(newest, version)
            if event == "steps":
                steps.append(FirstStep(process, version, newest))
        return steps

    @property
    def trained(self) -> list[Trained]:
        return [Trained(*json.loads(line)) for line in self._lines("trained")]

    def check_trained(self) -> None:
        """Check that no sequence has trained twice, and the versions of all tokens.

        They never decrease within a sequence, and an engine had put each of them in service.
        """
        committed = {version for event, _, version in self._events() if event == "commits"}
        trained = self.trained
        assert trained
        assert len({(sequence.group, sequence.index) for sequence in trained}) == len(trained)
        for sequence in trained:
            assert sequence.versions == sorted(sequence.versions), sequence
            assert set(sequence.versions) <= committed, sequence

    def _events(self) -> Iterator[tuple[str, int, int]]:
        """Yield the event, process and version of each line of `engines`."""
        for line in self._lines("engines"):
            event, process, version = line.split()
            yield event, int(process), int(version)

    def _lines(self, name: str) -> list[str]:
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []


def watch(folder: Path, patch: pytest.MonkeyPatch) -> Watched:
    """Let commands that start while `patch` lasts write to `folder`."""
    assert not FORKED, "run the test with QWEN35_TESTS=soak: a forked command would not be watched"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"from {__name__} import install\n\ninstall()\n")
    paths = [str(folder), os.environ.get("PYTHONPATH", ""), str(REPOSITORY)]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    patch.setenv(FOLDER, str(folder))
    return Watched(folder)


# From here on: in the processes of the command.


def install() -> None:
    """Patch each module of PATCHES when it has been imported. This imports none of them."""
    if FOLDER in os.environ:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in PATCHES else None
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module
            loader.exec_module = lambda module: (execute(module), PATCHES[fullname](module))
        return spec


def _patch_engine(module: Any) -> None:
    engine, no_version = module.VLLMEngine, module.NO_VERSION
    receive, commit, step = engine.receive, engine.commit, engine.step
    has_stepped = list[bool]()

    def fail_if_ordered(self: Any, method: str) -> None:
        if self.version != no_version and (act := _claimed(method)):
            ACTS[act](self)

    def watched_receive(self: Any, weights: Any, version: int) -> None:
        _write("engines", f"receives {os.getpid()} {version}")
        fail_if_ordered(self, "receive")
        receive(self, weights, version)

    def watched_commit(self: Any, version: int) -> None:
        fail_if_ordered(self, "commit")
        commit(self, version)
        _write("engines", f"commits {os.getpid()} {version}")

    def watched_step(self: Any) -> Any:
        if not has_stepped:
            _write("engines", f"steps {os.getpid()} {self.version}")
            has_stepped.append(True)
        elif self._sequences:
            fail_if_ordered(self, "step")
        return step(self)

    engine.receive, engine.commit, engine.step = watched_receive, watched_commit, watched_step


def _patch_generation(module: Any) -> None:
    take = module.Generation.take

    def watched_take(self: Any, groups: Sequence[int]) -> Any:
        taken = take(self, groups)
        for group in taken:
            for index, sequence in enumerate(group.sequences):
                versions = sequence.tokens.versions.tolist()
                _write("trained", json.dumps([group.group, group.prompt.prompt.id, index, versions]))
        return taken

    module.Generation.take = watched_take


def _patch_pool(module: Any) -> None:
    module.MAX_REPLACEMENT_DELAY_SECONDS = 0.1


PATCHES: dict[str, Callable[[Any], None]] = {
    "torch.cpu": remove_instructions,
    "qwen35_trainer.rollout.vllm": _patch_engine,
    "qwen35_trainer.runtime.generation": _patch_generation,
    "qwen35_trainer.runtime.rollout_pool": _patch_pool,
}
"""Module → what is done to it."""


def _write(name: str, line: str) -> None:
    with (Path(os.environ[FOLDER]) / name).open("a") as file:
        file.write(f"{line}\n")


def _claimed(method: str) -> str:
    """Return how this engine has to fail, if it is the one that claims an order for this method; otherwise ""."""
    order = Path(os.environ[FOLDER]) / "order"
    try:
        ordered, act = order.read_text().split()
        if ordered != method:
            return ""
        order.rename(order.with_name(f"claimed-{os.getpid()}"))
    except FileNotFoundError:  # there is none, or another engine was faster
        return ""
    return act


def _starve(_: Any) -> None:
    """Allocate more memory than the kernel gives. The model of the tests is too small to need some itself."""
    import torch

    present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + LEFT_BYTES, resource.RLIM_INFINITY))
    torch.empty(NEEDED_BYTES, dtype=torch.uint8)


def _damage(engine: Any) -> None:
    """Let vLLM compute with a weight that is not a number."""

    def damage(worker: Any) -> None:
        model = worker.model_runner.get_model()
        [norm] = [value for name, value in model.named_parameters() if name.endswith("model.norm.weight")]
        norm.data.fill_(math.nan)

    engine._core.collective_rpc(damage)


ACTS: dict[str, Callable[[Any], object]] = {
    "nan": _damage,
    "memory": _starve,
    "killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "hangs": lambda _: time.sleep(3600),
}
"""How an engine fails."""
