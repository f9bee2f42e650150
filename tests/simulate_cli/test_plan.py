"""`qwen35 plan`: what it recommends, and that it keeps to the rules of the manifest."""

import pytest

from qwen35_trainer.manifest import load_manifest

COPY = ("--workload", "publication.copy=10")
"""A quarter of the time of a batch of the small manifest, whose batches are too small for the assumed time of a copy."""
NEUTRAL = ("--decode", "1,0.004", "--train-seconds-per-token", "0.0375")


@pytest.fixture(scope="module")
def constants():
    return {}


@pytest.fixture
def planned(run_command, manifest, constants):
    """planned("--max-lag", 2) is the plan of the small manifest as JSON, made once."""

    def plan(*arguments):
        if arguments not in constants:
            constants[arguments] = run_command("plan", manifest(), "--json", *COPY, *arguments).json
        return constants[arguments]

    return plan


def test_the_plan_is_at_least_as_good_as_the_manifest_and_a_valid_one(planned, manifest):
    plan = planned()
    assert plan["set"]
    gain = plan["plan"]["result"]["effectiveThroughput"] / plan["manifest"]["result"]["effectiveThroughput"]
    assert gain > 1.1
    fields = plan["plan"]["fields"]
    assert fields["rollout.nodes"] + fields["train.nodes"] == 6
    assert plan["plan"]["result"]["maxTokenLag"] <= fields["async.maxVersionLag"] <= 3
    spec = load_manifest(manifest(), plan["set"]).spec
    assert (spec.rollout.nodes, spec.train.nodes) == (fields["rollout.nodes"], fields["train.nodes"])
    assert spec.async_.stalenessThreshold == fields["async.stalenessThreshold"]


def test_equal_manifests_get_equal_plans(planned, run_command, manifest):
    assert planned() == run_command("plan", manifest(), "--json", *COPY).json


def test_nodes_go_to_the_pool_that_is_short(planned):
    by_training = {
        seconds: planned("--decode", "1,0.004", "--train-seconds-per-token", seconds)["plan"]["fields"]["rollout.nodes"]
        for seconds in ("0.001", "0.5")
    }
    assert by_training["0.001"] > by_training["0.5"]


def test_a_lower_bound_is_kept(planned):
    plan = planned("--max-lag", 1)
    assert plan["maxLag"] == 1
    assert plan["plan"]["fields"]["async.maxVersionLag"] <= 1
    assert plan["plan"]["fields"]["async.stalenessThreshold"] <= 1
    assert plan["plan"]["result"]["maxTokenLag"] <= 1
    above = [each for each in plan["neighbours"] if each["fields"]["async.maxVersionLag"] > 1]
    assert not any(each["withinBound"] for each in above)


def test_no_neighbour_within_the_bound_is_better_by_more_than_the_slack(planned):
    plan = planned()
    within = [each for each in plan["neighbours"] if each["withinBound"]]
    assert within
    assert max(each["throughputChange"] for each in within) <= 1 / 0.98 - 1 + 1e-9
    enough = [each for each in within if each["throughputChange"] >= 0]
    assert all(each["result"]["meanLag"] >= plan["plan"]["result"]["meanLag"] - 0.1 for each in enough)


def test_no_plan_trains_faster_than_weights_can_be_copied(run_command, manifest):
    """A version of 16 sequences of 500 tokens in the mean, and a copy that takes 1,000."""
    plan = run_command("plan", manifest(), "--json", "--workload", "publication.copy=1000").json
    every = [plan["plan"]["result"], *(each["result"] for each in plan["neighbours"])]
    assert max(result["effectiveThroughput"] for result in every) < 1.1 * 16 * 500 / 1000
    assert min(result["trainCopying"] for result in every) > 0.5
    assert all(result["trainIdle"] < 0.5 for result in every), "copying is not waiting"


def test_a_neighbour_differs_in_one_thing(planned):
    plan = planned()
    own = plan["plan"]["fields"]
    for each in plan["neighbours"]:
        changed = {key for key in own if own[key] != each["fields"][key]}
        assert changed in ({"rollout.nodes", "train.nodes"}, *({key} for key in own)), each["change"]


def test_a_lane_that_is_not_faster_is_not_recommended(planned):
    plan = planned("--lane-speed", 1.0, *NEUTRAL)
    assert plan["plan"]["fields"]["rollout.stragglerLane"] is None


def test_the_search_stays_small(planned):
    assert planned()["simulations"] < 300


def test_the_table_fits_and_lists_the_assumptions(run_command, manifest):
    shown = run_command("plan", manifest(), "--cv", 1.5).out
    assert max(map(len, shown.splitlines())) <= 80
    assert "the plan" in shown
    assert "the manifest as it is" in shown
    assert shown.index("Given:") < shown.index("response length: lognormal, mean 500, cv 1.5") < shown.index("Assumed")
    assert "decode step: 1 + 0.004 per sequence" in shown
    assert "simulations" in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--decode", "1,0.004"), "share a unit of time: give both, or neither"),
        (("--workload", "policy=fifo"), "--workload policy: the plan or the manifest determines this field"),
        (("--workload", "lane.speed=3"), "--workload lane.speed: "),
        (("--workload", "publication.paus=3"), "publication.paus: publication has no field paus. Did you mean pause?"),
        (("--lane-speed", "0"), "--lane-speed 0.0 <= 0"),
        (("--cv", "-2"), "lengths.cv -2.0 < 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_reason(run_command, manifest, arguments, text):
    refused = run_command("plan", manifest(), *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert text in refused.err


def test_pools_that_share_their_devices_have_no_split_but_memory_and_times(run_command, manifest):
    colocated = {"mode": "Colocated", "rollout": {"nodes": 4}, "async_": None}
    model = {"name": "Qwen/Qwen3.5-0.8B", "source": {"path": "/models/qwen"}}
    assert run_command("plan", manifest(model=model, **colocated), "--json").json.keys() == {"resources"}
    refused = run_command("plan", manifest(**colocated))
    assert refused.code == 2
    assert "spec.model.name: Qwen/Qwen3.5-3B is not in the catalog" in refused.err


def test_memory_and_times_come_with_the_split(run_command, manifest):
    model = {"name": "Qwen/Qwen3.5-0.8B", "source": {"path": "/models/qwen"}}
    plan = run_command("plan", manifest(model=model), "--json", *COPY).json
    assert plan["resources"]["time"]["bottleneck"] in ("training", "generation", "publication")
    assert "plan" in plan


def test_a_sentence_names_the_speeds_of_the_split_and_the_lengths_of_both(run_command, manifest):
    """Without --mean, times assume half of the maximum length, and the split an eighth."""
    file = manifest(model={"name": "Qwen/Qwen3.5-0.8B", "source": {"path": "/models/qwen"}})
    shown = " ".join(run_command("plan", file, *COPY).out.split())
    between = shown[shown.index("bottleneck:") : shown.index("the manifest as it is")]
    assert "The split below is simulated with assumed speeds, not with the times above." in between
    assert "Its responses are lognormal, mean 500," in between
    assert "the times are for 2,000 tokens in the mean. Set speeds by --decode" in between
    shown = " ".join(run_command("plan", file, *COPY, *NEUTRAL, "--mean", 600).out.split())
    assert "with the speeds of --decode and --train-seconds-per-token, not with the times above." in shown
    assert "Its responses are lognormal, mean 600, cv 1, at most 4,000; the times are for 600 tokens" in shown
