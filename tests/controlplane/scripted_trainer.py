"""A trainer that only talks: it speaks the ConfigMap contract, and a script says what about.

    python -IS scripted_trainer.py SERVER CA TOKEN …        as Ray runs it, in the place of `qwen35 run …`

The script is an annotation of the training: a JSON list with the steps of each attempt; attempts beyond it repeat the
last, and no script is the step "hold". Steps, done in order:

    {"publish": 3}                  report 3 versions, one update each
    {"report": {"rolloutIdle": 1}}  report these fields, and keep them
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

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


@dataclass
class Trainer:
    """One attempt's driver."""

    client: Client
    maps: str
    """Path of the namespace's ConfigMaps."""
    training: str
    attempt: int
    skew: float = 0.0
    reported: dict[str, Any] = field(default_factory=dict)

    def do(self, step: Any) -> None:
        name, value = (step, None) if isinstance(step, str) else next(iter(step.items()))
        print(f"step {name} {value}"[:200], flush=True)
        getattr(self, f"do_{name}")(value)

    def do_publish(self, versions: int) -> None:
        for _ in range(versions):
            time.sleep(PAUSE)
            update = self.reported.get("update", 0) + 1
            self.report("Running", update=update, version=update, versionTime=self.now(), phase="training")

    def do_report(self, fields: dict[str, Any]) -> None:
        self.report("Running", **fields)

    def do_clock(self, seconds: float) -> None:
        self.skew = seconds

    def do_write(self, what: str | int) -> None:
        self.write(what if isinstance(what, str) else "x" * what)

    def do_obey(self, _: None) -> None:
        order = self.order()
        self.report("Running", stopAcknowledged=order, phase="saving")
        self.save()
        self.report("Stopped", stopAcknowledged=order)
        sys.exit(0)

    def do_acknowledge(self, _: None) -> None:
        self.report("Running", stopAcknowledged=self.order(), phase="saving")

    def do_await(self, file: str) -> None:
        while not Path(file).exists():
            time.sleep(PAUSE)

    def do_hold(self, _: None) -> None:
        while True:
            time.sleep(60)

    def do_terminate(self, _: None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

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
        return time.time() + self.skew

    def save(self) -> None:
        update = self.reported.get("update", 0)
        self.reported["checkpoint"] = {"uri": f"/checkpoints/update-{update:06}", "update": update, "time": self.now()}

    def report(self, state: str, **fields: Any) -> None:
        self.reported |= fields
        self.write(json.dumps({"attempt": self.attempt, "state": state, "time": self.now()} | self.reported))

    def write(self, text: str) -> None:
        self.client.request("PATCH", f"{self.maps}/{self.training}-progress", {"data": {"progress.json": text}})

    def order(self) -> str:
        """The id of the order to stop, once there is one."""
        while True:
            control = self.client.request("GET", f"{self.maps}/{self.training}-control")
            control_message = json.loads(control["data"]["control.json"])
            if control_message["attempt"] == self.attempt and control_message.get("stop"):
                return str(control_message["stop"]["id"])
            time.sleep(PAUSE)


def main(server: str, ca: str, token: str) -> None:
    job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]["job_submission_id"]
    name, attempt, uid = job.rsplit("-", 2)
    trainings = Client(server, ca, token).request("GET", TRAININGS)["items"]
    training = next(match["metadata"] for match in trainings if match["metadata"]["uid"].startswith(uid))
    namespace = f"/api/v1/namespaces/{training['namespace']}"
    account = f"{namespace}/serviceaccounts/{name}-trainer/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    own = Client(server, ca, token).request("POST", account, request)["status"]["token"]
    trainer = Trainer(Client(server, ca, own), f"{namespace}/configmaps", name, int(attempt))

    def interrupted(*_: object) -> NoReturn:
        if trainer.reported:
            trainer.save()
            trainer.report("Stopped", reason="Interrupted", message="a SIGTERM came")
        sys.exit(143)

    signal.signal(signal.SIGTERM, interrupted)
    script = json.loads(training.get("annotations", {}).get(ANNOTATION, '[["hold"]]'))
    for step in script[min(trainer.attempt, len(script)) - 1]:
        trainer.do(step)


def command(python: str, server: str, ca: Path, token: str) -> str:
    """An executable that Ray finds under the name `qwen35`."""
    return f'#!/bin/sh\nexec {python} -IS {Path(__file__)} {server} {ca} {token} "$@"\n'


if __name__ == "__main__":
    main(*sys.argv[1:4])
