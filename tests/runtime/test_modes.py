"""Whole runs of each mode, policy and source: the widest on a Ray of its own, the others in this process."""

import contextlib
import itertools
import re
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from qwen35_trainer.progress.records import TIME_PARTS, EvaluationRecord, SpanRecord, UpdateRecord
from qwen35_trainer.progress.sample_file import read_samples
from tests.testbed.processes import claim

EXAMPLES = Path(__file__).parents[2] / "examples"
HELD_OUT = [{"name": "held-out", "files": {"paths": ["validation.jsonl"]}}]
CHARACTERS_JUDGE = """
def score(prompt, response, answer, metadata):
    return float(sum(map(ord, response)) % 7)
"""
ASYNC_JUDGE = """
import asyncio

async def score(prompt, response, answer, metadata):
    if prompt == "5=":
        await asyncio.sleep(3600)
    await asyncio.sleep(0.01)
    return float(len(response))
"""
SYNC_JUDGE = """
def score(prompt, response, answer, metadata):
    if answer == "3":
        raise ValueError(f"no score for {prompt}")
    return response.count("1") - 0.1 * len(response)
"""
STRAGGLING = """
import asyncio

given = 0

async def score(prompt, response, answer, metadata):
    global given
    if answer in "07":  # until three batches of others have passed it, but not for ever: at the end there are none
        last = given + 3 * 16
        for _ in range(100):
            if given >= last:
                break
            await asyncio.sleep(0.05)
    else:
        await asyncio.sleep(0.02)
        given += 1
    return float(len(response)) + response.count("1")
"""
PARTLY_CONSTANT = """
def score(prompt, response, answer, metadata):
    return 0.5 if answer in "05" else float(sum(map(int, filter(str.isdigit, response))))
"""
MANY_CHARACTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 500)))
"""An end token is one in five hundred: responses are long."""


@contextlib.contextmanager
def _listening(ports: tuple[int, ...]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            claimed = claim(port)
            if claimed is None:  # another lane listens there, or is about to: just as well
                continue
            stack.enter_context(claimed)
            taken = stack.enter_context(socket.socket())
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # somebody else does
                taken.bind(("0.0.0.0", port))
                taken.listen()
        yield


@pytest.fixture(scope="module")
def wide(command, write, tmp_path_factory):
    """Two replicas and two ranks, with all the usual ports taken, and a reward that never answers for one prompt."""
    changes = {
        "rollout.nodes": 2,
        "train.nodes": 2,
        "train.updates": 6,
        "train.batch.microBatchSequences": 8,
        "async": {"stalenessThreshold": 0.5, "maxVersionLag": 1, "batchesPerPublication": 2, "updatesPerBatch": 2},
        "algorithm": {"groupSize": 4, "kl": {"placement": "Loss"}, "correction": {"type": "DecoupledPPO"}},
        "tracking": {"tensorboard": True},
        "data.shuffle": False,
    }
    file = write(tmp_path_factory.mktemp("wide"), changes, reward=ASYNC_JUDGE)
    with _listening((6379, 8265, 10001, 29500)):
        return command.run(file, "--set", "rewards[0].timeoutSeconds=10")


def test_four_workers_train_together_while_the_usual_ports_are_taken(wide):
    assert wide.code == 0, wide.err
    assert {path.name for path in (wide.folder / "logs").iterdir()} == {
        *("driver.log", "rollout-0.log", "rollout-1.log", "train-0.log", "train-1.log")
    }
    assert {span.lane for span in wide.of(SpanRecord) if span.kind == "generate"} == {"rollout-0", "rollout-1"}


def test_updates_that_fill_no_whole_version_are_still_published(wide):
    """3 batches of 2 updates, 2 batches a version: the third is a version cut short."""
    updates = wide.of(UpdateRecord)
    assert [record.update for record in updates] == [1, 2, 3, 4, 5, 6]
    assert [record.version for record in updates] == [0, 0, 0, 0, 1, 1]
    assert [span.label for span in wide.of(SpanRecord) if span.kind == "publish"] == ["version 1", "version 2"]


def test_kl_in_the_loss_is_reported_once_the_policy_has_moved(wide):
    kl = [record.kl for record in wide.of(UpdateRecord)]
    assert kl[0] == pytest.approx(0.0, abs=1e-5)
    assert kl[-1] > 0


def test_a_call_that_hangs_ends_at_its_time_out_and_is_counted(wide):
    assert wide.summary["rewardErrors"] == 4  # the group of one prompt
    assert wide.summary["outcome"] == "Succeeded"


def test_a_run_leaves_every_file_that_it_promises(wide):
    names = {path.name for path in wide.folder.iterdir()}
    assert names == {
        "run.yaml",
        "run.id",
        "run.lock",
        "owner.json",
        "metrics.jsonl",
        "samples.jsonl",
        "checkpoints",
        "journal",
        "tensorboard",
        "logs",
        "summary.json",
        "report.html",
    }
    assert any((wide.folder / "tensorboard").glob("events*"))


@pytest.fixture(scope="module")
def turns(local, write, removed, tmp_path_factory):
    changes = {
        "mode": "Colocated",
        "async": {"batchesPerPublication": 2},
        "train.updates": 6,
        "data.validation": HELD_OUT,
        "evaluation": {"everyUpdates": 2},
    }
    return local.run(write(tmp_path_factory.mktemp("turns"), changes, reward=SYNC_JUDGE))


def test_colocated_pools_take_turns(turns):
    assert turns.code == 0, turns.err
    assert sum(span.kind == "train" for span in turns.of(SpanRecord)) == 6
    assert turns.overlaps == []


@pytest.mark.parametrize("mode", ["turns", "supervised"])
def test_the_parts_of_the_trainers_time_add_up(mode, request):
    for record in request.getfixturevalue(mode).of(UpdateRecord):
        parts = {part: getattr(record, f"seconds_{part}") for part in TIME_PARTS}
        assert sum(parts.values()) == pytest.approx(record.seconds, abs=1e-3), parts
        assert parts["training"] > 0
    shares = request.getfixturevalue(mode).summary["trainTime"]
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-3)


def test_the_turns_of_colocated_pools_are_recorded_with_the_memory_that_they_give_back(turns):
    spans = [span for span in turns.of(SpanRecord) if span.kind == "turn"]
    assert {span.lane for span in spans} == {"devices"}
    assert [span.label.split(":")[0] for span in spans] == ["training", "generation"] * 3 + ["training"]
    assert all(earlier.end <= later.start for earlier, later in pairwise(spans))
    for kind, side in (("generate", "generation"), ("train", "training")):
        own = [span for span in spans if span.label.startswith(side)]
        for work in (span for span in turns.of(SpanRecord) if span.kind == kind and span.end <= spans[-1].start):
            assert any(turn.start <= work.start and work.end <= turn.end for turn in own), work
    assert all(re.fullmatch(r"\w+: gives back \d+\.\d\d of \d+\.\d\d GiB", span.label) for span in spans)


def test_the_losses_are_those_of_two_pools_when_nothing_is_generated_ahead(local, write, tmp_path):
    """With one sequence at a time, the draws do not depend on when sequences arrive."""
    losses = {}
    for mode, window in (("Colocated", {}), ("FullyAsync", {"stalenessThreshold": 0, "maxVersionLag": 0})):
        changes = {
            "mode": mode,
            "async": window,
            "rollout.maxSequencesPerReplica": 1,
            "checkpoint": {"everyUpdates": 3},
        }
        ended = local.run(write(tmp_path / mode, changes, reward=CHARACTERS_JUDGE))
        assert ended.code == 0, ended.err
        losses[mode] = [(record.loss, record.reward_mean) for record in ended.of(UpdateRecord)]
    assert len(losses["Colocated"]) == 3
    assert all(loss for loss, _ in losses["Colocated"]), "rewards differ"
    assert losses["Colocated"] == losses["FullyAsync"]


def test_colocated_tokens_are_never_old(turns):
    assert turns.summary["staleness"].keys() == {"0"}


def test_an_evaluation_is_of_the_weights_whose_update_it_names(turns):
    assert [(record.update, record.version) for record in turns.of(EvaluationRecord)] == [
        (0, 0),
        (2, 1),
        (4, 2),
        (6, 3),
    ]


def test_a_reward_that_raises_counts_and_the_run_continues(turns):
    """Each prompt whose answer is 3 raises for all samples of its group."""
    assert turns.summary["rewardErrors"] > 0
    assert sum(record.reward_errors for record in turns.of(UpdateRecord)) % 4 == 0
    assert "ValueError: no score for" in (turns.folder / "logs" / "driver.log").read_text()
    assert "reward errors" in turns.out
    assert turns.summary["errorsByReward"] == {"judge": turns.summary["rewardErrors"]}
    assert ": ValueError: no score for" in turns.summary["firstRewardError"]
    assert "reward_error=reward judge, prompt " in turns.out


def test_responses_of_updates_and_evaluations_can_be_read(turns):
    moments = read_samples(turns.folder / "samples.jsonl")
    assert [each.update for each in moments if each.kind == "held out"] == [0, 2, 4, 6]
    assert [each.update for each in moments if each.kind == "trained"] == [1, 2, 3, 4, 5, 6]
    prompts = {tuple(sample.prompt_id for sample in each.samples) for each in moments if each.kind == "held out"}
    assert len(prompts) == 1, "the same ones at each evaluation"
    for sample in (sample for each in moments for sample in each.samples):
        assert {lag for lag, _ in sample.response} <= {0}, "in Colocated no token is old"
        assert sample.reward == sample.scores["judge"]
    page = (turns.folder / "report.html").read_text()
    assert "Held-out responses" in page
    assert "Trained responses" in page


@pytest.fixture(scope="module")
def supervised(local, tmp_path_factory):
    output = tmp_path_factory.mktemp("sft") / "out"
    return local.run(EXAMPLES / "tiny-sft.yaml", "--set", "train.updates=40", output=output)


def test_supervised_training_lowers_the_loss_and_the_held_out_loss(supervised):
    assert supervised.code == 0, supervised.err
    losses = [record.loss for record in supervised.of(UpdateRecord)]
    held_out = [record.loss for record in supervised.of(EvaluationRecord)]
    assert losses[-1] < 0.8 * losses[0]
    assert held_out[-1] < 0.8 * held_out[0]


def test_the_held_out_loss_before_is_that_of_the_untrained_model(supervised):
    """About what one of the 15 tokens is worth to a model that knows nothing; measured before the first update."""
    first, before = supervised.of(UpdateRecord)[0], supervised.of(EvaluationRecord)[0]
    assert before.update == 0
    assert before.time < first.time
    assert before.loss == pytest.approx(first.loss, rel=0.01)


def test_the_time_of_evaluations_is_counted_as_such_in_supervised_training(supervised):
    evaluated = [record.update for record in supervised.of(UpdateRecord) if record.seconds_evaluating > 0]
    # An evaluation after an update precedes the next one; that of the last update precedes none.
    assert evaluated == [record.update + 1 for record in supervised.of(EvaluationRecord)][:-1]


def test_supervised_training_has_no_versions_no_lag_and_no_reward(supervised):
    updates = supervised.of(UpdateRecord)
    assert {(record.version, record.lag_max, record.reward_mean) for record in updates} == {(0, None, None)}


@pytest.fixture(scope="module", params=["MaskTokens", "Discard"])
def straggling(local, write, tmp_path_factory, request) -> SimpleNamespace:
    """A fifth of the prompts are scored when three batches' worth of the others have been."""
    changes = {
        "train.updates": 12,
        "async": {"stalenessThreshold": 1.0, "maxVersionLag": 1, "onMissedDeadline": request.param},
        "data.shuffle": False,
    }
    ended = local.run(write(tmp_path_factory.mktemp("straggling"), changes, prompts=48, reward=STRAGGLING))
    return SimpleNamespace(policy=request.param, ended=ended)


def test_a_missed_deadline_never_lets_an_old_token_into_the_loss(straggling):
    ended = straggling.ended
    assert ended.code == 0, ended.err
    assert ended.summary["maxTokenLag"] == 1
    assert (ended.summary["maskedTokens"] > 0) == (straggling.policy == "MaskTokens")


def test_after_missed_deadlines_every_prompt_has_still_left_once(straggling):
    progress = straggling.ended.progress(12)
    assert (progress["position"], progress["pending"]) == (48, [])
    assert sum(record.prompts for record in straggling.ended.of(UpdateRecord)) == 48


@pytest.fixture(scope="module")
def lane(local, write, tmp_path_factory):
    """One replica, and a lane of one with two threads: what has 8 tokens when it reports moves there."""
    changes = {
        "model.source.random.characters": MANY_CHARACTERS + "0123456789=",
        "data.maxResponseTokens": 200,
        # Few at a time: each then lives long enough to be reported with 8 tokens.
        "rollout": {"engine": "Torch", "maxSequencesPerReplica": 4, "nodes": 3}
        | {"stragglerLane": {"nodes": 2, "tensorParallel": 2, "afterTokens": 8}},
        "train.batch.microBatchSequences": 4,
    }
    return local.run(
        write(
            tmp_path_factory.mktemp("lane"),
            changes,
            reward="score = lambda prompt, response, answer, metadata: float(len(response))\n",
        )
    )


def test_stragglers_move_to_the_lane_and_finish_there(lane):
    assert lane.code == 0, lane.err
    assert {span.lane for span in lane.of(SpanRecord) if span.kind == "generate"} == {"rollout-0", "lane-0"}
    assert max(record.response_tokens_mean for record in lane.of(UpdateRecord)) > 100


def test_with_a_lane_every_prompt_trains_once_within_the_bound(lane):
    assert lane.summary["maxTokenLag"] <= 2
    progress = lane.progress(3)
    assert (progress["position"], progress["pending"]) == (12, [])
    assert sum(record.prompts for record in lane.of(UpdateRecord)) == 12


@pytest.fixture(scope="module")
def filtered(local, write, tmp_path_factory):
    """A fifth of the prompts are worth the same whatever the response."""
    changes = {"train.updates": 8, "algorithm.dynamicSampling": True}
    return local.run(write(tmp_path_factory.mktemp("filtered"), changes, reward=PARTLY_CONSTANT))


def test_groups_without_signal_are_replaced_by_others(filtered):
    assert filtered.code == 0, filtered.err
    updates = filtered.of(UpdateRecord)
    assert [record.prompts for record in updates] == [4] * 8
    assert [record.groups_without_signal for record in updates] == [0] * 8
    assert sum(record.groups_left.get("filtered", 0) for record in updates) > 0


def test_every_prompt_has_been_trained_or_filtered(filtered):
    left_groups = filtered.summary["groupsLeft"]
    progress = filtered.progress(8)
    assert left_groups.keys() == {"filtered"}
    assert (progress["position"], progress["pending"]) == (8 * 4 + left_groups["filtered"], [])


@pytest.fixture(scope="module")
def adapted(local, write, tmp_path_factory) -> SimpleNamespace:
    """Adapters alone train and travel, by large steps: two updates, and two more after a resume. Sampling is truncated."""
    changes = {
        "rollout.temperature": 0.7,
        "rollout.topP": 0.9,
        "rollout.topK": 8,
        "rollout.minP": 0.01,
        "train.updates": 4,
        "train.lora": {"rank": 4},
        "algorithm.kl": {
            "placement": "LossAndReward",
            "rewardCoefficient": 0.02,
            "adaptive": {"target": 1e-3, "horizon": 50},
        },
        "train.optimizer": {"learningRate": 0.05, "warmupUpdates": 0},
        "async": {"stalenessThreshold": 0.0, "maxVersionLag": 0},
    }
    file = write(tmp_path_factory.mktemp("adapted"), changes, reward=SYNC_JUDGE)
    first = local.run(file, "--set", "train.updates=2")
    last = first.folder / "checkpoints" / "update-000002"
    return SimpleNamespace(first=first, second=local.run(file, "--resume", last, output=file.parent / "second"))


def test_adapters_alone_make_the_rollout_score_as_the_trainer_does_before_and_after_a_resume(adapted):
    assert (adapted.first.code, adapted.second.code) == (0, 0), adapted.first.err + adapted.second.err
    updates = adapted.first.of(UpdateRecord) + adapted.second.of(UpdateRecord)
    assert [record.update for record in updates] == [1, 2, 3, 4]
    assert all(abs(record.behaviour_kl) < 1e-6 for record in updates)
    assert min(record.gradient_norm for record in updates) > 0


def test_the_kl_coefficient_adapts_and_continues_from_the_checkpoint_after_a_resume(adapted):
    updates = adapted.first.of(UpdateRecord) + adapted.second.of(UpdateRecord)
    assert updates[0].kl_coefficient == 0.02
    for before, after in itertools.pairwise(updates):
        error = min(max(before.kl / 1e-3 - 1, -0.2), 0.2)
        assert after.kl_coefficient == pytest.approx(before.kl_coefficient * (1 + error * before.samples / 50))
    assert len({record.kl_coefficient for record in updates}) == 4


def test_remax_and_sapo_train_with_long_responses_left_out_and_evaluations_measure_pass_at_k(local, write, tmp_path):
    changes = {
        "data.maxResponseTokens": 8,
        "data.validation": HELD_OUT,
        "algorithm": {
            "advantage": "ReMax",
            "groupSize": 4,
            "loss": {"type": "SAPO"},
            "correction": {"type": "None"},
            "maskTruncated": True,
            "overlongPenalty": {"bufferTokens": 8, "weight": 80.0},
        },
        "rollout.topK": 4,  # the greedy response has no candidates, the others have
        "evaluation": {"samplesPerPrompt": 4, "temperature": 1.0, "maxPrompts": 4},
        "train.updates": 2,
    }
    ended = local.run(write(tmp_path, changes, reward="def score(*_):\n    return 1.0\n"))
    assert ended.code == 0, ended.err
    for update in ended.of(UpdateRecord):
        # Three of four responses may train, and those that reached the limit do not.
        assert 0 < update.tokens < 0.75 * update.response_tokens_mean * update.samples
        assert update.reward_mean == pytest.approx(1 - 10 * update.response_tokens_mean)
        assert update.score_by_reward == {"judge": 1.0}
        assert update.gradient_norm > 0
    assert [evaluation.pass_at_k for evaluation in ended.of(EvaluationRecord)] == [{2: 1.0, 4: 1.0}] * 2


def test_the_fields_of_dapo_act_together(local, write, tmp_path):
    """The fields are those of docs/algorithms.md. The second update of a batch has ratios to clip."""
    changes = {
        "data.maxResponseTokens": 8,
        "data.shuffle": False,  # the first prompt is worth the same whatever the response
        "algorithm": {
            "groupSize": 4,
            "loss": {"clipLow": 0.2, "clipHigh": 0.28, "aggregation": "TokenMean"},
            "dynamicSampling": True,
            "overlongPenalty": {"bufferTokens": 6},
        },
        "async.updatesPerBatch": 2,
        "train.optimizer": {"learningRate": 0.05, "warmupUpdates": 0},
        "train.updates": 4,
    }
    ended = local.run(write(tmp_path, changes, reward=PARTLY_CONSTANT))
    assert ended.code == 0, ended.err
    updates = ended.of(UpdateRecord)
    assert [record.prompts for record in updates] == [4] * 4
    # Penalties differ within the groups that were left out: their scores without penalty do not.
    assert ended.summary["groupsLeft"]["filtered"] > 0
    assert [record.groups_without_signal for record in updates] == [0] * 4
    for record in updates:
        assert -1 < record.reward_mean - record.score_by_reward["judge"] < 0, "at most the weight, 1"
    # The batch's first update has the weights that the log-probs of the denominator are from.
    clipped = [record.clip_fraction for record in updates]
    assert clipped[::2] == [0, 0]
    assert min(clipped[1::2]) > 0


def test_a_gym_task_trains_with_its_own_scorer(local, write, tmp_path):
    changes = {
        "model.source.random": {"hiddenSize": 32, "intermediateSize": 32, "layers": 2, "fullAttentionInterval": 2}
        | {"characters": "".join(map(chr, range(32, 127))) + "\n"},
        "data.train": [{"name": "sums", "gym": {"task": "chain_sum", "size": 12, "config": {"max_terms": 2}}}],
        "data.maxPromptTokens": 256,
        "rewards": [{"type": "Gym"}],
        "train.updates": 2,
    }
    ended = local.run(write(tmp_path, changes))
    assert ended.code == 0, ended.err
    assert (ended.summary["updates"], ended.summary["rewardErrors"]) == (2, 0)
