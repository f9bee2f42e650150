"""`qwen35 simulate`: what it prints, what options change, what it refuses."""

import json
from statistics import fmean

import pytest

SHORT = ("--set", "batches=16", "--set", "warm_up=4")


def test_without_a_manifest_it_is_the_reference_load(said):
    shown = said("simulate").out
    assert "deadline-first · s 2, S 4 · Wait · P 32, G 8, K 1" in shown
    assert "8 engines × 64 slots · 8 trainer units" in shown
    assert "mean 4,000, cv 1, at most 32,000" in shown
    for word in ("throughput", "effective", "ideal", "lag of groups", "lag of tokens", "masked", "discarded"):
        assert word in shown
    for word in ("length", "bias", "idle slots", "idle trainer", "to fill"):
        assert word in shown
    assert "Guessed" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_waiting_by_deadline_halves_the_lag_of_fifo_at_the_same_throughput(said):
    ours = said("simulate", "--json").json["result"]
    fifo = said("simulate", "--policy", "fifo", "--staleness-threshold", 4, "--json").json["result"]
    assert ours["throughput"] >= 0.97 * fifo["throughput"]
    assert ours["meanLag"] <= 0.55 * fifo["meanLag"]
    assert (ours["maxLag"], fifo["maxLag"]) == (4, 4)
    assert ours["idealThroughput"] == pytest.approx(8 / 0.0375)


def test_equal_seeds_give_equal_results(said):
    first, again, other = (said("simulate", "--json", "--seed", seed, *SHORT).out for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_several_seeds_are_averaged(said):
    each = [said("simulate", "--json", "--seed", seed, *SHORT).json["result"] for seed in (5, 6)]
    both = said("simulate", "--json", "--seed", 5, "--seeds", 2, *SHORT).json["result"]
    for key in ("throughput", "meanLag", "idleTrainer"):
        assert both[key] == pytest.approx(fmean(result[key] for result in each))
    assert both["maxLag"] == max(result["maxLag"] for result in each)
    assert both["exits"]["trained"] == sum(result["exits"]["trained"] for result in each)


def test_sizes_and_knobs_come_from_the_manifest(said, manifest):
    file = manifest(
        accelerator={"perNode": 4},
        rollout={"nodes": 3, "tensorParallel": 2, "lane": {"nodes": 1, "tensorParallel": 4, "afterTokens": 900}},
        async_={"updatesPerSync": 2, "requireBatches": 3, "onMissedDeadline": "MaskTokens"},
    )
    load = said("simulate", file, "--json", *SHORT).json["load"]
    assert load["engines"] == 4  # two nodes of four devices, two to an engine; the third node is the lane
    assert load["slots"] == 32
    assert load["trainerUnits"] == 8  # sixteen devices, two to a unit as to an engine
    assert load["lane"] == {"engines": 1, "speed": 1.5, "afterTokens": 900}
    assert (load["promptsPerBatch"], load["groupSize"], load["batchesPerVersion"]) == (12, 4, 2)
    assert (load["stalenessThreshold"], load["maxVersionLag"], load["onMissedDeadline"]) == (1.0, 3, "MaskTokens")
    assert load["lengths"] == "lognormal, mean 500, cv 1, at most 4,000"


def test_options_override_the_manifest(said, manifest):
    options = ("--staleness-threshold", 2, "--max-version-lag", 5, "--mean", 700, "--cv", 0.5, "--cap", 2000)
    load = said("simulate", manifest(), "--json", *options, "--set", "engines=3", *SHORT).json["load"]
    assert (load["stalenessThreshold"], load["maxVersionLag"], load["engines"]) == (2.0, 5, 3)
    assert load["lengths"] == "lognormal, mean 700, cv 0.5, at most 2,000"


def test_what_no_manifest_says_is_told_as_a_guess(said, manifest):
    said_so = said("simulate", manifest(), "--json", *SHORT).json["constants"]
    assert {each["name"] for each in said_so if each["guess"]} >= {"decode step", "training", "response length"}
    speeds = ("--decode", "0.02,0.0001", "--train-seconds-per-token", "0.001", "--cv", 2)
    given = said("simulate", manifest(), "--json", *speeds, *SHORT).json["constants"]
    assert {each["name"] for each in given if not each["guess"]} == {"decode step", "training", "response length"}
    assert "Guessed, and decisive" in said("simulate", manifest(), *SHORT).out


def test_another_policy_drops_what_only_deadlines_have(said, manifest):
    file = manifest(async_={"onMissedDeadline": "MaskTokens"})
    load = said("simulate", file, "--policy", "completion", "--json", *SHORT).json["load"]
    assert (load["policy"], load["onMissedDeadline"], load["maxVersionLag"]) == ("completion", "Wait", None)


def test_a_colocated_manifest_takes_turns_on_its_devices_once(said, manifest):
    file = manifest(mode="Colocated", rollout={"nodes": 4, "tensorParallel": 2}, async_=None)  # eight devices
    found = said("simulate", file, "--json", *SHORT).json
    assert found["load"]["policy"] == "colocated"
    assert (found["load"]["engines"], found["load"]["trainerUnits"]) == (4, 4)
    assert found["result"]["maxTokenLag"] == 0
    refused = said("simulate", file, "--policy", "fifo")
    assert (refused.code, "mode is Colocated" in refused.err) == (2, True)


def test_a_sweep_has_a_row_for_each_combination(said):
    found = said(
        "simulate", "--json", "--sweep", "policy=deadline-first,fifo", "--sweep", "staleness-threshold=1,2,3", *SHORT
    ).json  # fmt: skip
    values = [tuple(row["values"].values()) for row in found["rows"]]
    assert values == [(policy, s) for policy in ("deadline-first", "fifo") for s in ("1", "2", "3")]
    alone = said("simulate", "--json", "--policy", "fifo", "--staleness-threshold", 2, *SHORT).json
    assert found["rows"][4]["result"] == alone["result"]


def test_a_sweep_leaves_out_what_cannot_be(said):
    sweep = ("simulate", "--sweep", "staleness-threshold=1,5", "--sweep", "max-version-lag=2,6", *SHORT)
    found = said(*sweep, "--json").json
    assert [row["values"] for row in found["rows"]] == [
        {"staleness-threshold": "1", "max-version-lag": "2"},
        {"staleness-threshold": "1", "max-version-lag": "6"},
        {"staleness-threshold": "5", "max-version-lag": "6"},
    ]
    (left_out,) = found["leftOut"]
    assert left_out["values"] == {"staleness-threshold": "5", "max-version-lag": "2"}
    assert left_out["problems"] == [
        "staleness_threshold 5.0 > max_version_lag 2: groups would be born past their deadline"
    ]
    shown = said(*sweep).out
    assert "left out: staleness-threshold 5, max-version-lag 2: " in shown


def test_a_wide_sweep_fits_eighty_columns(said):
    shown = said(
        "simulate", "--sweep", "missed-deadline=Wait,Discard,MaskTokens", "--sweep", "staleness-threshold=2,3", *SHORT
    ).out  # fmt: skip
    assert max(map(len, shown.splitlines())) <= 80
    assert "MaskTokens" in shown


def test_a_lane_made_by_options_decodes_in_the_unit_of_the_pool(said):
    # Half the time for everything is twice the throughput, and the same lags; a power of two keeps floats exact.
    lane = ("--set", "lane.after_tokens=6000", "--json", *SHORT)
    steps = said("simulate", "--decode", "1,0.004", "--train-seconds-per-token", "0.0375", *lane).json["result"]
    halves = said("simulate", "--decode", "0.5,0.002", "--train-seconds-per-token", "0.01875", *lane).json["result"]
    assert halves["throughput"] == pytest.approx(2 * steps["throughput"])
    assert halves["lagHistogram"] == steps["lagHistogram"]
    assert steps["moves"] > 0


def test_lengths_are_replayed_up_to_the_limit_of_the_manifest(said, manifest, tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text("".join(f'{{"prompt": {n % 5}, "tokens": {1000 if n % 2 else 9000}}}\n' for n in range(50)))
    found = said("simulate", manifest(), "--lengths", file, "--json", *SHORT).json
    assert found["load"]["lengths"] == "replayed, 50 of 5 prompts, at most 4,000"
    assert found["result"]["trueMeanLength"] == pytest.approx(2500)


@pytest.mark.parametrize(
    ("content", "line"),
    [("", "not a single line"), ("12\n-3\n", ":2: -3 tokens < 1"), ("12\nlong\n", ":2: 'long' is not numeric")],
)
def test_a_bad_length_file_names_the_line(said, tmp_path, content, line):
    file = tmp_path / "lengths.jsonl"
    file.write_text(content)
    refused = said("simulate", "--lengths", file)
    assert refused.code == 2
    assert f"{file}" in refused.err
    assert line in refused.err


def test_every_problem_is_told_at_once(said, tmp_path):
    refused = said(
        "simulate", "--staleness-threshold", 9, "--cv", -1, "--set", "lane.sped=2", "--set", "batches", "--set", "a=1",
        "--sweep", "policy=fifo,lifo", "--sweep", "seed=1,,2", "--decode", "1", "--plot", tmp_path / "no" / "x.html",
    )  # fmt: skip
    assert (refused.code, refused.out) == (2, "")
    for text in (
        "/no does not exist",
        "--sweep seed=1,,2: write KEY=a,b,c",
        "--decode 1: write BASE,PER_SEQUENCE",
        "give both, or neither",
        "batches: has no value; write batches=VALUE",
        "lane.sped: there is no sped in lane. Did you mean speed?",
        "a: there is no a in load. Known here: ",
        "policy: 'lifo': Input should be 'deadline-first', 'fifo'",
        "lengths.cv -1.0 < 0",
        "staleness_threshold 9.0 > max_version_lag 4",
    ):
        assert text in refused.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--missed-deadline", "Maskt"), "Input should be 'Wait', 'MaskTokens' or 'Discard'"),
        (("--set", "engines=0"), "nothing is ever generated"),
        (("--set", "dynamic_sampling=true", "--set", "signal=0"), "every group is filtered, no batch ever fills"),
        (("--set", "pools[2].count=1"), "pools has 1 item, counted from 0"),
        (("--set", "trainer=8"), "trainer: '8': "),
        (("--set", "seed.x=8"), "seed has nothing inside; set it whole"),
        (("--set", "pools.engine=[1"), "is not valid YAML"),
        (("--sweep", "cv=1,2", "--sweep", "lengths.cv=1"), "is swept twice"),
        (("--sweep", f"seed={','.join(map(str, range(2000)))}"), "2000 rows, more than 1000"),
        (("--pareto", "1.2", "--mean", "5"), "each says what the lengths are; use one"),
        (("--pareto", "0"), "lengths.alpha 0.0 <= 0"),
        (("--lengths", "/nowhere.jsonl"), "/nowhere.jsonl: cannot be read: No such file"),
        (("--decode", "0,0", "--train-seconds-per-token", "1"), "a step takes no time"),
        (("--train-seconds-per-token", "-1", "--decode", "1,1"), "--train-seconds-per-token -1.0 <= 0"),
        (("nowhere.yaml",), "nowhere.yaml: the file does not exist."),
        (("--set", "signal=0.001", "--set", "dynamic_sampling=true"), "too rare for dynamic_sampling"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_reason(said, arguments, text):
    refused = said("simulate", *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert text in refused.err


def test_supervised_training_has_nothing_to_simulate(said, manifest):
    sources = [{"name": "answers", "files": {"paths": ["train.jsonl"]}}]
    without = dict.fromkeys(("rollout", "rewards", "async_", "algorithm"))
    file = manifest(mode="SFT", data={"train": sources}, train={"nodes": 2}, **without)
    for command in ("simulate", "plan"):
        refused = said(command, file)
        assert (refused.code, refused.out) == (2, "")
        assert "spec.mode: SFT generates nothing" in refused.err


def test_a_broken_manifest_is_refused_with_its_problems(said, manifest):
    refused = said("simulate", manifest(train={"nodes": 3}), "--cv", "1", "--set", "batches")
    assert refused.code == 2
    assert "spec.train.batch: " in refused.err
    assert "batches: has no value" in refused.err


def test_json_holds_numbers_only_where_there_are_some(said):
    # No engine ever fills: no time at which all slots were taken. JSON has null for it, and no NaN anywhere.
    text = said("simulate", "--json", "--set", "slots=4096", *SHORT).out
    found = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))
    assert found["result"]["timeToFull"] is None
