"""No attack of a tenant reaches the trainings of others: the table of attacks.py, against an operator that serves both.

namespace of the attacker      one training for each attack, and one that runs and has to continue after each
namespace of the neighbours    trainings whose children nobody changes, and whose reports arrive after each attack
"""

import io
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from qwen35_operator.console.screen import draw
from qwen35_operator.console.training_view import TrainingView
from qwen35_operator.status.times import at
from tests.controlplane import chart_release
from tests.controlplane.attacks import ATTACKS, NEIGHBOURS, OTHER, Attack, RefusedByServer, Reported
from tests.controlplane.conftest import fresh_namespace
from tests.controlplane.live_training import CHILDREN, LiveTraining
from tests.controlplane.operator_process import OperatorProcess
from tests.controlplane.story_place import StoryPlace
from tests.testbed.api import Refused
from tests.testbed.control_plane import ControlPlane
from tests.virtual.operators import VirtualOperator

BUG = "this is a bug"
"""What the operator logs about an exception that it does not expect."""
CHILDREN_EVERY = 8
"""Attacks between two looks at all children of the neighbours."""
OWN_WRITERS = ("rayjobs", "rayclusters", "pods")
"""Kinds whose status others write all the time: of these, only identity and content are compared."""


@dataclass
class Neighbourhood:
    """The trainings of others, as they were before the attacks."""

    operator: OperatorProcess | VirtualOperator
    trainings: list[LiveTraining]

    def __post_init__(self) -> None:
        for training in self.trainings:
            training.apply()
        for training in self.trainings:
            begin(training)
        self.before = [self._settled(training) for training in self.trainings]
        self.pid, self.bugs = self.operator.pid, self.operator.log.count(BUG)
        self.update = 1

    def is_untouched(self, *, children_too: bool) -> None:
        """Check that reports reach the status, that the operator is well, and perhaps that nobody has ever changed a child.

        The latter lists every child, and need not follow each attack: a child that was repaired keeps a mark of it.
        """
        self.update += 1
        for training in self.trainings:
            save(training, self.update)
        for training, before in zip(self.trainings, self.before, strict=True):
            is_saved(training, self.update)
            assert not children_too or children(training) == before
            assert (training.state, len(training.attempts)) == ("Running", 1)
        assert self.operator.readiness()[0] == 200
        assert self.operator.pid == self.pid
        assert self.operator.log.count(BUG) == self.bugs, self.operator.log[-4000:]

    def _settled(self, training: LiveTraining) -> dict[str, Any]:
        seen: list[dict[str, Any]] = [{}]

        def is_unchanged() -> bool:
            seen.append(children(training))
            if seen[-1] != seen[-2]:
                training.plane.wait(1)
            return seen[-1] == seen[-2]

        training.until(is_unchanged, "its children are complete")
        return seen[-1]


def children(training: LiveTraining) -> dict[str, Any]:
    """Every object of a training, with what changes when somebody changes it."""
    marks = {}
    for plural in {*CHILDREN, *OWN_WRITERS}:
        for item in training.mine(plural):
            metadata = item["metadata"]
            own = plural in OWN_WRITERS or metadata["name"] == f"{training.name}-progress"
            mark = metadata.get("generation") if plural != "pods" else None
            marks[f"{plural}/{metadata['name']}"] = metadata["uid"], mark if own else metadata["resourceVersion"]
    return marks


def begin(training: LiveTraining) -> None:
    """Report for the first time, once all pods run."""
    training.until_pods("train", 1)
    training.until_pods("rollout", 2)
    save(training, 1)
    training.until_condition("Ready", "True", "Running")


def save(training: LiveTraining, update: int) -> None:
    """Report a checkpoint: unlike other numbers, it is copied to the status immediately."""
    saved = {"uri": f"/checkpoints/{update}", "update": update, "time": training.plane.now()}
    training.report(update=update, version=update, checkpoint=saved)


def is_saved(training: LiveTraining, update: int) -> None:
    training.until(lambda: training.status.get("lastCheckpoint", {}).get("update") == update, "its report is read")


def carry_out(attack: Attack, own: LiveTraining) -> None:
    """Attack, and check the outcome."""
    outcome = attack.outcome
    if isinstance(outcome, RefusedByServer):
        with pytest.raises(Refused, match=re.escape(outcome.words)):
            attack.act(own)
        return
    attack.act(own)
    if isinstance(outcome, Reported):
        own.until_condition(outcome.condition, outcome.status, outcome.reason)
        assert outcome.words in own.whole_condition(outcome.condition)["message"]
    else:
        own.until(lambda: outcome.holds(own), outcome.what)


def shown(own: LiveTraining) -> str:
    """What `qwen35 status` prints about a training."""
    file = io.StringIO()
    console = Console(file=file, width=200, color_system=None, legacy_windows=False)
    console.print(draw(TrainingView.of(own.body), at(own.plane.now())))
    return file.getvalue()


@contextmanager
def named(attack: Attack) -> Iterator[None]:
    """Name the attack in what fails."""
    try:
        yield
    except BaseException as problem:
        problem.add_note(f"attack: {attack.name}")
        raise


@pytest.fixture
def neighbourhood(world: StoryPlace, operator: OperatorProcess | VirtualOperator) -> Iterator[Neighbourhood]:
    """Two healthy trainings in a namespace of their own."""
    with fresh_namespace(world.plane, f"others-{secrets.token_hex(4)}") as other:
        yield Neighbourhood(operator, [LiveTraining(world.plane, other, name) for name in NEIGHBOURS])


def attack_all(attacks: list[Attack], live_training: LiveTraining, neighbourhood: Neighbourhood) -> None:
    plane, namespace = live_training.plane, live_training.namespace
    victim = LiveTraining(plane, namespace, "victim")
    if any(attack.running for attack in attacks):
        begin(victim.apply())
    for number, attack in enumerate(attacks, 2):
        own = victim if attack.running else LiveTraining(plane, namespace, attack.training)
        with named(attack):
            carry_out(attack, own)
            neighbourhood.is_untouched(children_too=number % CHILDREN_EVERY == 0 or attack is attacks[-1])
            if own.find("qwen35trainings", own.name) is not None:
                assert not set("\x1b\x07\x9b\u202e") & set(shown(own))
            if attack.running:
                save(victim, number)
                is_saved(victim, number)
                victim.until_condition("Degraded", "False", "AsExpected")
                assert [attempt["number"] for attempt in victim.attempts] == [1]
            elif own.find("qwen35trainings", own.name) is not None:
                own.delete()
    pods = f"{live_training.path('pods', None)}?labelSelector=rl.qwen35.io/training={OTHER}"
    plane.api.request("DELETE", pods)


def test_at_least_forty_attacks_are_tried_on_both_and_each_has_a_name() -> None:
    assert len([attack for attack in ATTACKS if not attack.real_only]) >= 40
    trainings = [attack.training for attack in ATTACKS]
    assert len(trainings) == len(set(trainings))


@pytest.mark.worlds("memory", "real")
@pytest.mark.parametrize("begun", [False, True], ids=["new trainings", "a running training"])
def test_no_attack_reaches_another_training(
    world: StoryPlace, live_training: LiveTraining, neighbourhood: Neighbourhood, begun: bool
):
    real = world.operators is None
    suited = [attack for attack in ATTACKS if not attack.policy and (real or not attack.real_only)]
    attack_all([attack for attack in suited if attack.running == begun], live_training, neighbourhood)


def test_what_would_give_a_tenant_the_node_is_refused_by_the_charts_policy(
    control_plane: ControlPlane, live_training: LiveTraining, neighbourhood: Neighbourhood
):
    attacks = [attack for attack in ATTACKS if attack.policy]
    with chart_release.installed(control_plane):
        live_training.until(lambda: is_refused(live_training, attacks[0]), "the policy acts")
        attack_all(attacks, live_training, neighbourhood)


def is_refused(live_training: LiveTraining, attack: Attack) -> bool:
    """Whether the policy refuses the attack. A policy acts some seconds after its creation."""
    own = LiveTraining(live_training.plane, live_training.namespace, f"try-{secrets.token_hex(4)}")
    try:
        attack.act(own)
    except Refused:
        return True
    own.delete()
    return False
