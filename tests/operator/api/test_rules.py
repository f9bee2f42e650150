"""The CEL rules stand where they can, and say what to do."""

import re

import pytest

from qwen35_operator.api import crd
from qwen35_operator.api.rules import RULES
from qwen35_trainer.manifest import fixed

SCHEMA = crd.schema()
NODES = dict(crd.fields(SCHEMA))
ALL = [(place, rule) for place, rules in RULES.items() for rule in rules]
FIXED = {
    "spec.mode",
    "spec.seed",
    "spec.model",
    "spec.accelerator.profile",
    "spec.train.engine",
    "spec.train.parallelism",
    "spec.train.freeze",
    "spec.train.optimizer.type",
    "spec.algorithm.groupSize",
    "spec.data",
}
ALSO_FIXED = {".checkpoint.storage", ".train.lora", ".train.multiTokenPrediction"}
OF_THE_CLUSTER = {"spec.accelerator.profile", "spec.train.parallelism", "spec.checkpoint.storage"}
"""Fixed here alone: `qwen35 run` may continue from a checkpoint on other devices, and save it elsewhere."""
WHILE_SUSPENDED = {
    ".accelerator",
    ".rewards",
    ".algorithm",
    ".train",
    ".async",
    ".publication",
    ".tracking",
    ".pods",
    ".rollout",
    ".rollout.stragglerLane",
    ".rollout.vllm",
}


@pytest.mark.parametrize(("place", "rule"), ALL)
def test_a_rule_names_a_field_that_exists(place, rule):
    assert f"{place}{rule.field or ''}" in NODES


@pytest.mark.parametrize(("place", "rule"), ALL)
def test_an_expression_reads_only_fields_that_exist(place, rule):
    """The API server refuses the whole definition otherwise."""
    for text in (rule.rule, rule.expression or ""):
        for path in re.findall(r"\b(?:self|oldSelf)((?:\.\w+(?![\w(]))+)", text):
            read = f"{place}{path}".replace("__function__", "function")  # a reserved word of CEL
            assert read in NODES or read == ".metadata.name", f"{read} in {text}"


@pytest.mark.parametrize(("place", "rule"), ALL)
def test_a_message_is_one_line_that_says_what_to_do(place, rule):
    assert rule.message.endswith(".")
    assert "\n" not in rule.message
    assert rule.reason in {"FieldValueInvalid", "FieldValueForbidden"}


@pytest.mark.parametrize(("place", "rule"), ALL)
def test_parentheses_and_quotes_are_balanced(place, rule):
    for text in (rule.rule, rule.expression or ""):
        assert all(text.count(opening) == text.count(closing) for opening, closing in ("()", "[]"))
        assert text.count("'") % 2 == 0


@pytest.mark.parametrize(("place", "rule"), [(place, rule) for place, rule in ALL if rule.expression])
def test_a_message_gets_as_many_values_as_it_has_places(place, rule):
    text, values = rule.expression.removesuffix("])").split(".format([")
    assert text.count("%d") + text.count("%s") == values.count(", ") + 1


# The API server tries the rules of a section with a default on that default as it stands, {}, and refuses the
# definition when a field that a rule reads is not there yet.
@pytest.mark.parametrize(("place", "rule"), ALL)
def test_rules_stand_at_no_section_with_a_default(place, rule):
    assert NODES[place].get("default") != {} or "oldSelf" in rule.rule


@pytest.mark.parametrize(("place", "rule"), ALL)
def test_optional_fields_are_asked_for_before_they_are_read(place, rule):
    if place == "":
        return
    # Within lists `self` is the item; the names read there are checked by the same walk.
    words = rule.rule.replace("(", " ").replace(")", " ").replace(",", " ").replace("!", " ").split()
    for word in words:
        if not word.startswith("self.") or word.endswith((".all", ".exists", ".exists_one")):
            continue
        path = word.removeprefix("self.").replace("__function__", "function")
        here = place
        for part in path.split("."):
            if f"{here}.{part}" not in NODES:
                break
            here = f"{here}.{part}"
            parent, name = here.rsplit(".", 1)
            always_set = "default" in NODES[here] or name in NODES[parent].get("required", [])
            guarded = f"has(self{here.removeprefix(place).replace('.function', '.__function__')})" in rule.rule
            assert always_set or guarded, f"{here} may be missing in {rule.rule}"


def test_what_a_checkpoint_depends_on_cannot_change():
    final = [(place, rule) for place, rule in ALL if "oldSelf" in rule.rule and "oldSelf.suspend" not in rule.rule]
    assert {place for place, rule in final if rule.rule == "self == oldSelf"} == FIXED
    assert {rule.field for _, rule in final if rule.rule != "self == oldSelf"} == ALSO_FIXED
    assert all("Create a new Qwen35Training" in rule.message for _, rule in final)


def test_what_is_fixed_here_is_what_the_trainer_refuses_to_resume_with():
    of_the_trainer = {f"spec.{path}" for path in fixed.FIXED}
    assert of_the_trainer | OF_THE_CLUSTER == FIXED | {f"spec{field}" for field in ALSO_FIXED}


def test_what_a_running_attempt_cannot_take_over_changes_only_while_suspended():
    rules = [rule for _, rule in ALL if "oldSelf.suspend" in rule.rule]
    assert {rule.field for rule in rules} == WHILE_SUSPENDED
    assert all("suspend: true" in rule.message for rule in rules)


def test_every_section_is_fixed_or_changes_while_suspended_or_is_live():
    live = {
        "suspend",
        "evaluation",
        "checkpoint",
        "failurePolicy",
        "disruptionBudget",
        "cleanupSecondsAfterFinished",
        "activeDeadlineSeconds",
    }
    ruled = {place.removeprefix("spec.") for place in FIXED} | {field[1:] for field in ALSO_FIXED | WHILE_SUSPENDED}
    assert set(NODES["spec"]["properties"]) - live <= ruled


def test_every_field_of_the_rollout_pool_is_ruled_or_is_its_size():
    (rule,) = (rule for _, rule in ALL if rule.field == ".rollout" and "oldSelf.suspend" in rule.rule)
    ruled = {name for name in NODES["spec.rollout"]["properties"] if f"self.rollout.{name} ==" in rule.rule} | {
        "stragglerLane",
        "vllm",
    }
    assert set(NODES["spec.rollout"]["properties"]) - ruled == {"nodes", "minNodes", "maxNodes", "autoscale"}
