"""A trainer that only talks: it speaks the ConfigMap contract, and a script says what about.

    python -IS scripted_trainer.py SERVER CA TOKEN …        as Ray runs it, in the place of `qwen35 run …`

The script is an annotation of the training: a JSON list with the steps of each attempt; attempts beyond it repeat the
last, and no script is the step "hold". Steps, done in order:

    {"publish": 3}                  report 3 versions, one update each
    {"report": {"rolloutIdle": 1}}  report these fields, and keep them
    {"train": 60}                   train until 60 prompts are done, one update each, from where the checkpoint is
    {"clock": -3600}                seconds that this machine's clock is off from now on
    {"write": "garbage"}            write a text as it is
    {"write": 1000000}              write 1,000,000 letters
    "obey"                          wait for the order to stop, save a checkpoint, say so, exit 0
    "acknowledge"                   wait for the order to stop, and say that it was heard
    {"await": "/a/file"}            do nothing until the file is there
    "hold"                          do nothing any more
    "terminate"                     get a SIGTERM
    {"succeed": "all done"}         say so, exit 0
    {"fail": ["DataError", "why"]}  say so, exit 1
    {"exit": 3}                     end without a word

A SIGTERM is answered as the real trainer does: it saves, stops, and reports so; a trainer that has not reported so far stays silent,
for a test speaks in its place. What it may do is what the token of the training's own ServiceAccount may; the
administrator's token is for finding the training and asking for that one.
"""

import json
import os
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

ANNOTATION = "test.qwen35.io/script"
TRAININGS = "/apis/rl.qwen35.io/v1alpha1/qwen35trainings"
PAUSE = 0.2
REFUSED = 120.0
"""Seconds for which a refusal is taken for that of an API server that has just started."""


@dataclass(frozen=True)
class Client:
    """The API server, with a bearer token. Retries while nobody answers, and refusals for a while: an API server that has
    just started refuses everybody.
    """

    server: str
    ca: str
    token: str

    def request(self, method: str, path: str, body: Any = None) -> Any:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        request = urllib.request.Request(self.server + path, sent, headers, method=method)
        context = ssl.create_default_context(cafile=self.ca)
        since: float | None = None
        while True:
            try:
                with urllib.request.urlopen(request, timeout=10, context=context) as answer:
                    return json.load(answer)
            except OSError as problem:
                print(f"{method} {path}: {problem}", flush=True)
                since = (since or time.monotonic()) if isinstance(problem, urllib.error.HTTPError) else None
                if since is not None and time.monotonic() > since + REFUSED:
                    sys.exit(f"{method} {path} is refused")
                time.sleep(PAUSE)


class Requests(Protocol):
    """Sends one request to the API server, and returns the answer's JSON."""

    def request(self, method: str, path: str, body: Any = None) -> Any: ...


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class Trainer:
    """One attempt's driver. Its steps yield the seconds for which it waits, and end it by SystemExit."""

    client: Requests
    maps: str
    """Path of the namespace's ConfigMaps."""
    training: str
    attempt: int
    cluster: str | None = None
    """Name of the RayCluster, which every report contains; None where KubeRay has not started the process."""
    volume: dict[str, Any] = field(default_factory=dict)
    """What all trainers of the training share, as they share a claim: the checkpoint, and a log of trained prompts."""
    skew: float = 0.0
    reported: dict[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    terminate: Callable[[], object] = _kill_this_process
    """Sends the trainer a SIGTERM."""

    def play(self, scripts: list[list[Any]]) -> Iterator[float]:
        """Do the steps of this attempt."""
        for step in scripts[min(self.attempt, len(scripts)) - 1]:
            yield from self.do(step)

    def do(self, step: Any) -> Iterator[float]:
        name, value = (step, None) if isinstance(step, str) else next(iter(step.items()))
        print(f"step {name} {value}"[:200], flush=True)
        yield from getattr(self, f"do_{name}")(value) or ()

    def do_publish(self, versions: int) -> Iterator[float]:
        for _ in range(versions):
            yield PAUSE
            update = self.reported.get("update", 0) + 1
            self.report("Running", update=update, version=update, versionTime=self.now(), phase="training")

    def do_train(self, prompts: int) -> Iterator[float]:
        self.reported |= self.volume.get("checkpoint", {})
        while (done := self.reported.get("prompts", 0)) < prompts:
            yield PAUSE
            self.volume.setdefault("log", []).append(done)
            update = self.reported.get("update", 0) + 1
            self.report("Running", update=update, version=update, prompts=done + 1, versionTime=self.now())

    def do_report(self, fields: dict[str, Any]) -> None:
        self.report("Running", **fields)

    def do_clock(self, seconds: float) -> None:
        self.skew = seconds

    def do_write(self, what: str | int) -> None:
        self.write(what if isinstance(what, str) else "x" * what)

    def do_obey(self, _: None) -> Iterator[float]:
        order = yield from self.order()
        self.report("Running", stopAcknowledged=order, phase="saving")
        self.save()
        self.report("Stopped", stopAcknowledged=order)
        sys.exit(0)

    def do_acknowledge(self, _: None) -> Iterator[float]:
        order = yield from self.order()
        self.report("Running", stopAcknowledged=order, phase="saving")

    def do_await(self, file: str) -> Iterator[float]:
        while not Path(file).exists():
            yield PAUSE

    def do_hold(self, _: None) -> Iterator[float]:
        while True:
            yield 60

    def do_terminate(self, _: None) -> Iterator[float]:
        self.terminate()
        yield 60

    def do_succeed(self, message: str) -> None:
        self.save()
        self.report("Succeeded", message=message)
        sys.exit(0)

    def do_fail(self, why: list[str]) -> None:
        self.report("Failed", reason=why[0], message=why[1])
        sys.exit(1)

    def do_exit(self, code: int) -> None:
        sys.exit(code)

    def now(self) -> float:
        return self.clock() + self.skew

    def interrupted(self) -> NoReturn:
        """What a SIGTERM does."""
        if self.reported:
            self.save()
            self.report("Stopped", reason="Interrupted", message="a SIGTERM came")
        sys.exit(143)

    def save(self) -> None:
        update = self.reported.get("update", 0)
        self.reported["checkpoint"] = {"uri": f"/checkpoints/update-{update:06}", "update": update, "time": self.now()}
        kept = ("update", "version", "prompts", "checkpoint")
        self.volume["checkpoint"] = {name: self.reported[name] for name in kept if name in self.reported}

    def report(self, state: str, **fields: Any) -> None:
        self.reported |= fields
        own = {"attempt": self.attempt, "state": state, "time": self.now()}
        own |= {} if self.cluster is None else {"cluster": self.cluster}
        self.write(json.dumps(own | self.reported))

    def write(self, text: str) -> None:
        self.client.request("PATCH", f"{self.maps}/{self.training}-progress", {"data": {"progress.json": text}})

    def order(self) -> Generator[float, None, str]:
        """Wait for the order to stop. Returns its id."""
        while True:
            # By name, as the real trainer does: its account may not get the object.
            selected = self.client.request("GET", f"{self.maps}?fieldSelector=metadata.name={self.training}-control")
            for control in selected["items"]:
                control_message = json.loads(control["data"]["control.json"])
                if control_message["attempt"] == self.attempt and control_message.get("stop"):
                    return str(control_message["stop"]["id"])
            yield PAUSE


def name_of(job: str) -> tuple[str, int, str]:
    """The training, the attempt, and the first letters of the training's uid, by the id of a Ray job."""
    name, attempt, uid = job.rsplit("-", 2)
    return name, int(attempt), uid


def scripts_of(metadata: dict[str, Any]) -> list[list[Any]]:
    """The steps of each attempt, from the training's annotation."""
    return list(json.loads(metadata.get("annotations", {}).get(ANNOTATION, '[["hold"]]')))


def main(server: str, ca: str, token: str) -> None:
    job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]["job_submission_id"]
    name, attempt, uid = name_of(job)
    trainings = Client(server, ca, token).request("GET", TRAININGS)["items"]
    training = next(match["metadata"] for match in trainings if match["metadata"]["uid"].startswith(uid))
    namespace = f"/api/v1/namespaces/{training['namespace']}"
    account = f"{namespace}/serviceaccounts/{name}-trainer/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    own = Client(server, ca, token).request("POST", account, request)["status"]["token"]
    trainer = Trainer(Client(server, ca, own), f"{namespace}/configmaps", name, attempt)
    signal.signal(signal.SIGTERM, lambda *_: trainer.interrupted())
    for seconds in trainer.play(scripts_of(training)):
        time.sleep(seconds)


def command(python: str, server: str, ca: Path, token: str) -> str:
    """An executable that Ray finds under the name `qwen35`."""
    return f'#!/bin/sh\nexec {python} -IS {Path(__file__)} {server} {ca} {token} "$@"\n'


if __name__ == "__main__":
    main(*sys.argv[1:4])
