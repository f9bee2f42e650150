import pytest

from qwen35_trainer import __version__
from qwen35_trainer.progress.records import FinishRecord, RunRecord
from qwen35_trainer.progress.summary import summarise

from .conftest import make_update


def test_the_summary_of_a_run_by_hand(run: list[RunRecord]) -> None:
    summary = summarise(run, max_version_lag=2, peak_rss_mib=512.5)
    assert summary == {
        "outcome": "Succeeded",
        "message": "3 updates",
        "seconds": 20.0,
        "updates": 3,
        "updatesTotal": 3,
        "weightVersion": 3,
        "version": __version__,
        "startedAt": "2026-01-31T09:30:00Z",
        "accuracyBefore": 0.125,
        "accuracyAfter": 0.75,
        "heldOutRewardBefore": 0.1,
        "heldOutRewardAfter": 0.5,
        "heldOutScores": {"digit": 0.75, "brevity": 0.25},
        "heldOutRewardBySource": {"easy": 0.75, "hard": 0.25},
        "heldOutLossBefore": None,
        "heldOutLossAfter": None,
        "rewardMean": pytest.approx(0.6),
        "scoreByReward": {"digit": pytest.approx(0.6), "brevity": 0.5},
        "rewardBySource": {"easy": 0.5, "hard": 0.25},
        "loss": pytest.approx(-0.03),
        "promptsTrained": 12,
        "samplesTrained": 48,
        "tokensTrained": 1200,
        "maskedTokens": 15,
        "maxVersionLag": 2,
        "maxTokenLag": 2,
        # 200 tokens at 0, 900 at 1, 100 at 2
        "meanTokenLag": pytest.approx(1100 / 1200),
        "staleness": {"0": 200, "1": 900, "2": 100},
        # weighted by 2, 2 and 4 seconds
        "rolloutIdle": pytest.approx((0.1 * 4 + 0.3 * 4) / 8),
        "trainIdle": pytest.approx((0.2 * 4 + 0.6 * 4) / 8),
        # of 8 seconds: three times 1.4 trained, 0.4 waited, and 0.1 of the driver
        "trainTime": {
            "training": pytest.approx(4.2 / 8),
            "waiting": pytest.approx(1.2 / 8),
            "driver": pytest.approx(0.3 / 8),
        },
        "tokensPerSecond": pytest.approx(700.0),
        "trainedTokensPerSecond": pytest.approx(150.0),
        "samplesPerSecond": pytest.approx(6.0),
        "timeToFirstUpdateSeconds": 12.0,
        "peakRssMiB": 512.5,
        "rewardErrors": 4,
        "errorsByReward": {"digit": 3},
        "timeoutsByReward": {"brevity": 1},
        "firstRewardError": "reward digit, prompt easy/0: ValueError: <b>ill</b>",
        "groupsWithoutSignal": 6,
        "groupsLeft": {},
        "checkpoint": "checkpoints/update-2",
        "export": None,
        "exportProblem": "",
    }


def test_the_start_is_that_of_the_first_attempt() -> None:
    resumed = [make_update(1, time=5.0, wall_time=1000.0), make_update(2, time=7.0, wall_time=9000.0)]
    assert summarise(resumed, max_version_lag=4, peak_rss_mib=None)["startedAt"] == "1970-01-01T00:16:35Z"
    assert summarise([make_update(1, wall_time=None)], max_version_lag=4, peak_rss_mib=None)["startedAt"] is None


def test_an_empty_run_has_a_summary() -> None:
    summary = summarise([], max_version_lag=4, peak_rss_mib=None)
    assert (summary["outcome"], summary["updates"], summary["seconds"]) == (None, 0, 0.0)
    assert (summary["maxTokenLag"], summary["staleness"], summary["checkpoint"]) == (None, {}, None)


def test_sft_has_neither_lag_nor_generated_tokens(supervised_run: list[RunRecord]) -> None:
    summary = summarise(supervised_run, max_version_lag=None, peak_rss_mib=None)
    assert summary["maxTokenLag"] is None
    assert summary["rolloutIdle"] is None
    assert summary["tokensPerSecond"] is None
    assert summary["trainedTokensPerSecond"] == 250.0


def test_only_updates_in_the_final_weights_count() -> None:
    course = [make_update(1), make_update(2, lag_histogram={7: 1}), make_update(2)]
    summary = summarise(course, max_version_lag=4, peak_rss_mib=None)
    assert (summary["updates"], summary["maxTokenLag"]) == (2, 1)


def test_a_lag_without_tokens_does_not_count() -> None:
    summary = summarise([make_update(1, lag_histogram={0: 3, 9: 0})], max_version_lag=4, peak_rss_mib=None)
    assert (summary["maxTokenLag"], summary["staleness"]) == (0, {"0": 3})


def test_groups_that_left_untrained_add_up_by_reason() -> None:
    course = [
        make_update(1, groups_left={"filtered": 3}),
        make_update(2, groups_left={"filtered": 7}),
        make_update(2, groups_left={"filtered": 2, "failed": 1}),  # again, by a resumed attempt
        make_update(3),
    ]
    summary = summarise(course, max_version_lag=4, peak_rss_mib=None)
    assert summary["groupsLeft"] == {"failed": 1, "filtered": 5}


def test_a_resumed_attempt_has_not_ended_as_the_one_before() -> None:
    stopped = FinishRecord(outcome="Stopped", message="asked to", time=12.0)
    assert summarise([make_update(1), stopped], max_version_lag=4, peak_rss_mib=None)["outcome"] == "Stopped"
    assert summarise([make_update(1), stopped, make_update(2)], max_version_lag=4, peak_rss_mib=None)["outcome"] is None


def test_a_diverged_loss_is_left_out_of_the_summary() -> None:
    assert summarise([make_update(1, loss=float("nan"))], max_version_lag=4, peak_rss_mib=None)["loss"] is None
