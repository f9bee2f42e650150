"""`qwen35 simulate`: what it prints, what options change, what it refuses."""

import json
from statistics import fmean

import pytest

SHORT = ("--workload", "batches=16", "--workload", "warm_up=4")


def test_without_a_manifest_it_is_the_reference_workload(run_command):
    shown = run_command("simulate").out
    assert "deadline-first · s 2, S 4 · Wait · P 32, G 8, K 1" in shown
    assert "8 replicas × 64 slots · 8 trainer units" in shown
    assert "mean 4,000, cv 1, at most 32,000" in shown
    for word in ("throughput", "effective", "ideal", "lag of groups", "lag of tokens", "masked", "discarded"):
        assert word in shown
    for word in ("length", "bias", "idle slots", "idle trainer", "to fill"):
        assert word in shown
    assert "Guessed" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_waiting_by_deadline_halves_the_lag_of_fifo_at_the_same_throughput(run_command):
    ours = run_command("simulate", "--json").json["result"]
    fifo = run_command("simulate", "--policy", "fifo", "--staleness-threshold", 4, "--json").json["result"]
    assert ours["throughput"] >= 0.97 * fifo["throughput"]
    assert ours["meanLag"] <= 0.55 * fifo["meanLag"]
    assert (ours["maxLag"], fifo["maxLag"]) == (4, 4)
    assert ours["idealThroughput"] == pytest.approx(8 / 0.0375)


def test_equal_seeds_give_equal_results(run_command):
    first, again, other = (run_command("simulate", "--json", "--seed", seed, *SHORT).out for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_several_seeds_are_averaged(run_command):
    each = [run_command("simulate", "--json", "--seed", seed, *SHORT).json["result"] for seed in (5, 6)]
    both = run_command("simulate", "--json", "--seed", 5, "--seeds", 2, *SHORT).json["result"]
    for key in ("throughput", "meanLag", "trainIdle"):
        assert both[key] == pytest.approx(fmean(result[key] for result in each))
    assert both["maxLag"] == max(result["maxLag"] for result in each)
    assert both["exits"]["trained"] == sum(result["exits"]["trained"] for result in each)


def test_sizes_and_knobs_come_from_the_manifest(run_command, manifest):
    file = manifest(
        accelerator={"devicesPerNode": 4},
        rollout={
            "engine": "VLLM",
            "nodes": 3,
            "tensorParallel": 2,
            "stragglerLane": {"nodes": 1, "tensorParallel": 4, "afterTokens": 900},
        },
        async_={"batchesPerPublication": 2, "updatesPerBatch": 3, "onMissedDeadline": "MaskTokens"},
    )
    workload = run_command("simulate", file, "--json", *SHORT).json["workload"]
    assert workload["replicas"] == 4  # two nodes of four devices, two to a replica; the third node is the lane
    assert workload["slots"] == 32
    assert workload["trainerUnits"] == 8  # sixteen devices, two to a unit as to a replica
    assert workload["lane"] == {"replicas": 1, "speed": 1.5, "afterTokens": 900}
    assert (workload["promptsPerBatch"], workload["groupSize"], workload["batchesPerVersion"]) == (12, 4, 2)
    assert (workload["stalenessThreshold"], workload["maxVersionLag"], workload["onMissedDeadline"]) == (
        1.0,
        3,
        "MaskTokens",
    )
    assert workload["lengths"] == "lognormal, mean 500, cv 1, at most 4,000"


def test_options_override_the_manifest(run_command, manifest):
    options = ("--staleness-threshold", 2, "--max-version-lag", 5, "--mean", 700, "--cv", 0.5, "--cap", 2000)
    workload = run_command("simulate", manifest(), "--json", *options, "--workload", "replicas=3", *SHORT).json[
        "workload"
    ]
    assert (workload["stalenessThreshold"], workload["maxVersionLag"], workload["replicas"]) == (2.0, 5, 3)
    assert workload["lengths"] == "lognormal, mean 700, cv 0.5, at most 2,000"


def test_set_changes_the_manifest_as_it_does_for_a_run(run_command, manifest):
    workload = run_command("simulate", manifest(), "--json", "--set", "async.maxVersionLag=5", *SHORT).json["workload"]
    assert workload["maxVersionLag"] == 5


def test_a_set_option_for_the_workload_is_refused_with_the_option_to_use(run_command, manifest):
    refused = run_command("simulate", "--set", "replicas=3")
    assert refused.code == 2
    assert "changes a manifest, and none is given; for the workload use --workload replicas=3" in refused.err
    refused = run_command("simulate", manifest(), "--set", "lane.speed=3", "--set", "train.updatez=3")
    assert refused.code == 2
    assert "is not a field of the manifest; for the workload use --workload lane.speed=3" in refused.err
    assert "spec.train.updatez: this is not a known field. Did you mean updates?" in refused.err


def test_what_a_manifest_does_not_contain_is_listed_as_an_assumption(run_command, manifest):
    listed = run_command("simulate", manifest(), "--json", *SHORT).json["constants"]
    assert {each["name"] for each in listed if each["assumed"]} >= {"decode step", "training", "response length"}
    speeds = ("--decode", "0.02,0.0001", "--train-seconds-per-token", "0.001", "--cv", 2)
    constants = run_command("simulate", manifest(), "--json", *speeds, *SHORT).json["constants"]
    assert {each["name"] for each in constants if not each["assumed"]} == {"decode step", "training", "response length"}
    assert "Assumed, and decisive" in run_command("simulate", manifest(), *SHORT).out


@pytest.mark.parametrize(
    ("changes", "publication"),
    [
        ({}, "6000 to copy"),
        ({"rollout": {"tensorParallel": 2}}, "1.2e+04 to copy"),
        ({"train": {"lora": {}}}, "0 to copy"),
        ({"accelerator": {"profile": "CPU"}}, "18 to copy"),
    ],
)
def test_the_time_of_a_copy_of_the_weights_is_assumed_by_device_and_size(run_command, manifest, changes, publication):
    constants = run_command("simulate", manifest(**changes), "--json", *SHORT).json["constants"]
    values = {each["name"]: each["value"] for each in constants}
    assert values["publication"].startswith(publication)
    assert values["scoring"] == "0 after the last token of a group"
    assert values["prefill"].startswith("150 tokens per unit of time")


def test_another_policy_drops_what_only_deadlines_have(run_command, manifest):
    file = manifest(async_={"onMissedDeadline": "MaskTokens"})
    workload = run_command("simulate", file, "--policy", "completion", "--json", *SHORT).json["workload"]
    assert (workload["policy"], workload["onMissedDeadline"], workload["maxVersionLag"]) == ("completion", "Wait", None)


def test_a_colocated_manifest_takes_turns_on_its_devices_once(run_command, manifest):
    file = manifest(mode="Colocated", rollout={"nodes": 4, "tensorParallel": 2}, async_=None)  # eight devices
    result = run_command("simulate", file, "--json", *SHORT).json
    assert result["workload"]["policy"] == "colocated"
    assert (result["workload"]["replicas"], result["workload"]["trainerUnits"]) == (4, 4)
    assert result["result"]["maxTokenLag"] == 0
    refused = run_command("simulate", file, "--policy", "fifo")
    assert (refused.code, "mode is Colocated" in refused.err) == (2, True)


def test_a_sweep_has_a_row_for_each_combination(run_command):
    result = run_command(
        "simulate", "--json", "--sweep", "policy=deadline-first,fifo", "--sweep", "staleness-threshold=1,2,3", *SHORT
    ).json  # fmt: skip
    values = [tuple(row["values"].values()) for row in result["rows"]]
    assert values == [(policy, s) for policy in ("deadline-first", "fifo") for s in ("1", "2", "3")]
    alone = run_command("simulate", "--json", "--policy", "fifo", "--staleness-threshold", 2, *SHORT).json
    assert result["rows"][4]["result"] == alone["result"]


def test_a_sweep_leaves_out_what_cannot_be(run_command):
    sweep = ("simulate", "--sweep", "staleness-threshold=1,5", "--sweep", "max-version-lag=2,6", *SHORT)
    result = run_command(*sweep, "--json").json
    assert [row["values"] for row in result["rows"]] == [
        {"staleness-threshold": "1", "max-version-lag": "2"},
        {"staleness-threshold": "1", "max-version-lag": "6"},
        {"staleness-threshold": "5", "max-version-lag": "6"},
    ]
    (left_out,) = result["leftOut"]
    assert left_out["values"] == {"staleness-threshold": "5", "max-version-lag": "2"}
    assert left_out["problems"] == [
        "staleness_threshold 5.0 > max_version_lag 2: groups would start after their deadline"
    ]
    shown = run_command(*sweep).out
    assert "left out: staleness-threshold 5, max-version-lag 2: " in shown


def test_a_wide_sweep_fits_eighty_columns(run_command):
    shown = run_command(
        "simulate", "--sweep", "missed-deadline=Wait,Discard,MaskTokens", "--sweep", "staleness-threshold=2,3", *SHORT
    ).out  # fmt: skip
    assert max(map(len, shown.splitlines())) <= 80
    assert "MaskTokens" in shown


def test_a_lane_made_by_options_decodes_in_the_unit_of_the_pool(run_command):
    # Half the time for everything is twice the throughput, and the same lags; a power of two keeps floats exact.
    lane = ("--workload", "lane.after_tokens=6000", "--json", *SHORT)
    steps = run_command("simulate", "--decode", "1,0.004", "--train-seconds-per-token", "0.0375", *lane).json["result"]
    halves = run_command("simulate", "--decode", "0.5,0.002", "--train-seconds-per-token", "0.01875", *lane).json[
        "result"
    ]
    assert halves["throughput"] == pytest.approx(2 * steps["throughput"])
    assert halves["lagHistogram"] == steps["lagHistogram"]
    assert steps["moves"] > 0


def test_lengths_are_replayed_up_to_the_limit_of_the_manifest(run_command, manifest, tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text("".join(f'{{"prompt": {n % 5}, "tokens": {1000 if n % 2 else 9000}}}\n' for n in range(50)))
    result = run_command("simulate", manifest(), "--lengths", file, "--json", *SHORT).json
    assert result["workload"]["lengths"] == "replayed, 50 of 5 prompts, at most 4,000"
    assert result["result"]["trueMeanLength"] == pytest.approx(2500)


@pytest.mark.parametrize(
    ("content", "line"),
    [("", "has no lengths"), ("12\n-3\n", ":2: -3 tokens < 1"), ("12\nlong\n", ":2: 'long' is not numeric")],
)
def test_a_bad_length_file_names_the_line(run_command, tmp_path, content, line):
    file = tmp_path / "lengths.jsonl"
    file.write_text(content)
    refused = run_command("simulate", "--lengths", file)
    assert refused.code == 2
    assert f"{file}" in refused.err
    assert line in refused.err


def test_all_problems_are_reported_together(run_command, tmp_path):
    refused = run_command(
        "simulate", "--staleness-threshold", 9, "--cv", -1, "--workload", "lane.sped=2", "--workload", "batches", "--workload", "a=1",
        "--sweep", "policy=fifo,lifo", "--sweep", "seed=1,,2", "--decode", "1", "--plot", tmp_path / "no" / "x.html",
    )  # fmt: skip
    assert (refused.code, refused.out) == (2, "")
    for text in (
        "/no does not exist",
        "--sweep seed=1,,2: write KEY=a,b,c",
        "--decode 1: write BASE,PER_SEQUENCE",
        "give both, or neither",
        "batches: has no value. Write batches=VALUE.",
        "lane.sped: lane has no field sped. Did you mean speed?",
        "a: the workload has no field a. Known names: ",
        "policy: 'lifo': Input should be 'deadline-first', 'fifo'",
        "lengths.cv -1.0 < 0",
        "staleness_threshold 9.0 > max_version_lag 4",
    ):
        assert text in refused.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--missed-deadline", "Maskt"), "Input should be 'Wait', 'MaskTokens' or 'Discard'"),
        (("--workload", "replicas=0"), "nothing is ever generated"),
        (
            ("--workload", "dynamic_sampling=true", "--workload", "signal=0"),
            "every group is filtered, no batch ever fills",
        ),
        (("--workload", "pools[2].count=1"), "pools has 1 item, counted from 0"),
        (("--workload", "trainer=8"), "trainer: '8': "),
        (("--workload", "seed.x=8"), "seed has no fields; set it whole"),
        (("--workload", "pools.replica=[1"), "is not valid YAML"),
        (("--workload", "trainer="), "trainer: has an empty value. Write null for no value"),
        (("--sweep", "cv=1,2", "--sweep", "lengths.cv=1"), "is swept twice"),
        (("--sweep", f"seed={','.join(map(str, range(2000)))}"), "2000 rows, more than 1000"),
        (("--pareto", "1.2", "--mean", "5"), "each defines the lengths; use one"),
        (("--pareto", "1.2", "--mean", "0"), "each defines the lengths; use one"),
        (("--pareto", "0"), "lengths.alpha 0.0 <= 0"),
        (("--lengths", "/nowhere.jsonl"), "/nowhere.jsonl: cannot be read: No such file"),
        (("--decode", "0,0", "--train-seconds-per-token", "1"), "a step takes no time"),
        (("--train-seconds-per-token", "-1", "--decode", "1,1"), "--train-seconds-per-token -1.0 <= 0"),
        (("nowhere.yaml",), "nowhere.yaml: the file does not exist."),
        (("--workload", "signal=0.001", "--workload", "dynamic_sampling=true"), "too rare for dynamic_sampling"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_reason(run_command, arguments, text):
    refused = run_command("simulate", *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert text in refused.err


def test_supervised_training_has_nothing_to_simulate(run_command, manifest):
    sources = [{"name": "answers", "files": {"paths": ["train.jsonl"]}}]
    without = dict.fromkeys(("rollout", "rewards", "async_", "algorithm"))
    file = manifest(mode="SFT", data={"train": sources}, train={"nodes": 2}, **without)
    refused = run_command("simulate", file)
    assert (refused.code, refused.out) == (2, "")
    assert "spec.mode: SFT generates nothing" in refused.err


def test_a_broken_manifest_is_refused_with_its_problems(run_command, manifest):
    refused = run_command("simulate", manifest(train={"nodes": 3}), "--cv", "1", "--workload", "batches")
    assert refused.code == 2
    assert "spec.train.batch: " in refused.err
    assert "batches: has no value" in refused.err


def test_json_holds_numbers_only_where_there_are_some(run_command):
    # No replica ever fills: no time at which all slots were taken. JSON has null for it, and no NaN anywhere.
    text = run_command("simulate", "--json", "--workload", "slots=4096", *SHORT).out
    parsed = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))
    assert parsed["result"]["timeToFull"] is None
