"""The experts that the engine on vLLM records for router replay: one engine of vLLM itself for each family, on tiny models.

They are compared with the choices of the library's routers in float32. Where the logits of two experts are almost equal, rounding
to bfloat16 may choose the other one, which changes the later layers of the same token a little.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qwen35_trainer.data.expert_choices import replayed
from qwen35_trainer.engines.micro_batch import Offsets, micro_batch, response_scores
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import VLLMSpec
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.pipeline.events import SequenceId
from qwen35_trainer.rollout.rollout_engine import GeneratedTokens
from qwen35_trainer.rollout.vllm import VLLMEngine
from qwen35_trainer.rollout.vllm_choice_worker import STEP_CHOICES, RoutedStep
from qwen35_trainer.rollout.vllm_choices import ChoiceRecord, ChoiceTable, RouterSizes
from tests.rollout.loading import load
from tests.rollout.qwen3 import qwen3_models
from tests.rollout.routed import Compared, collected_logits, library_logits, replayed_logits
from tests.rollout.shown import scored_by_the_library, shown_scenes
from tests.rollout.test_vllm import END, GREEDY, MAX_LENGTH, SHAPE, SLOTS, Replica, engine_of, library_model, prompt_of
from tests.rollout.test_vllm_pictures import pictured

EXPERTS, CHOSEN = 8, 2
WITH_EXPERTS = SHAPE | {"experts": EXPERTS, "expertsPerToken": CHOSEN}
STEP_TOKENS = {"Qwen3.5": 512, "Qwen3": 256}
"""Maximum number of tokens of a step: longer prompts take several steps. A block of the caches has no more tokens."""
LONG = 600


@pytest.fixture(scope="module", params=list(STEP_TOKENS))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    if request.param == "Qwen3.5":
        models = {seed: library_model(seed, WITH_EXPERTS) for seed in (0, 1)}
    else:
        models = qwen3_models(tmp_path_factory.mktemp("model") / "folder", (0, 1), num_experts=EXPERTS)
    options = VLLMSpec(maxBatchedTokens=STEP_TOKENS[request.param])
    with engine_of(models[0].config, records_choices=True, options=options) as (engine, core):
        yield Replica(engine, core, models, set())


@pytest.fixture
def replica(built: Replica) -> Iterator[Replica]:
    """The engine with the weights of seed 0, and afterwards without sequences."""
    built.load(0)
    yield built
    built.clear()


def layers_of(replica: Replica) -> int:
    return int(replica.models[0].config.get_text_config().num_hidden_layers)


def inputs_of(prompt: Sequence[int], tokens: GeneratedTokens) -> list[int]:
    return [*prompt, *tokens.ids.tolist()][:-1]


def choices_of(tokens: GeneratedTokens) -> np.ndarray:
    assert tokens.choices is not None
    return tokens.choices


def assert_complete(replica: Replica, prompt: Sequence[int], tokens: GeneratedTokens) -> None:
    assert choices_of(tokens).shape == (len(prompt) + len(tokens) - 1, layers_of(replica), CHOSEN)
    assert choices_of(tokens).dtype == np.uint8


def assert_like_the_library(
    replica: Replica, prompt: Sequence[int], responses: Sequence[GeneratedTokens], seed: int
) -> None:
    compared = Compared()
    for tokens in responses:
        assert_complete(replica, prompt, tokens)
        compared.add(choices_of(tokens), library_logits(replica.models[seed], inputs_of(prompt, tokens)))
    assert compared.equal_share > 0.9, compared


def lasting_prompt(replica: Replica, length: int, tokens: int) -> list[int]:
    """A prompt whose greedy response has this many tokens or more."""
    for seed in range(100):
        prompt = prompt_of(length, seed)
        [completed] = replica.generate(prompt, tokens, GREEDY)
        if completed.truncated:
            return prompt
    raise AssertionError("every response ended")


def test_experts_of_prompts_and_responses_are_those_of_the_librarys_routers(replica: Replica) -> None:
    compared, of_other_inputs, of_other_layers, of_other_weights = (Compared() for _ in range(4))
    prompts = {length: prompt_of(length) for length in (2, 7, 300)}
    names = {length: replica.submit(prompt, 24, samples=3) for length, prompt in prompts.items()}
    finished = replica.finish()
    for length, prompt in prompts.items():
        for tokens in (finished[name].tokens for name in names[length]):
            assert_complete(replica, prompt, tokens)
            choices, inputs = choices_of(tokens), inputs_of(prompt, tokens)
            logits = library_logits(replica.models[0], inputs)
            compared.add(choices, logits)
            of_other_inputs.add(np.roll(choices, 1, 0), logits)
            of_other_layers.add(np.roll(choices, 1, 1), logits)
            of_other_weights.add(choices, library_logits(replica.models[1], inputs))
    others = (of_other_inputs, of_other_layers, of_other_weights)
    print(compared, *others)
    assert compared.clear_share > 0.6
    assert compared.equal_share > 0.95
    assert all(other.equal_share < 0.6 for other in others)


def trained(
    replica: Replica, prompts: Sequence[Sequence[int]], responses: Sequence[GeneratedTokens], *, replay: bool
) -> Any:
    """Compute the responses with the trainer's model in bfloat16, as FSDP does.

    Returns the difference of each log-prob from that of the rollout, and the experts that were computed, (inputs, layers, k).
    """
    ids = np.concatenate([tokens.ids for tokens in responses])
    batch = TrainBatch(
        prompts=np.concatenate(prompts).astype(np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in prompts]),
        responses=ids,
        response_lengths=np.array([len(tokens) for tokens in responses]),
        trainable=np.ones(len(ids), np.bool_),
        log_probs=np.concatenate([tokens.log_probs for tokens in responses]),
        replayed=tuple([(choices_of(tokens), len(tokens))] for tokens in responses) if replay else None,
    )
    model = adapt(copy.deepcopy(replica.models[0]).bfloat16(), float32_logits=True)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _gate, _inputs, routed: chosen.append(routed[-1]))
    row = micro_batch(batch, Offsets.of(batch), np.arange(batch.samples), None, packed=True, device=torch.device("cpu"))
    with torch.no_grad():
        scores = response_scores(model, row, 1.0, with_entropy=False)
    assert row.responses.log_probs is not None
    return (scores.log_probs - row.responses.log_probs)[row.responses.mask], torch.stack(chosen, dim=1).numpy()


def test_the_trainer_computes_every_token_with_the_experts_of_the_rollout(replica: Replica) -> None:
    """Both in bfloat16, with the same weights. Without replay, routers choose other experts for some tokens, and log-probs differ more."""
    prompts = [prompt_of(length, seed) for length, seed in ((3, 0), (40, 1), (300, 2), (9, 3))]
    responses = [replica.generate(prompt, 40)[0].tokens for prompt in prompts]
    rollout = np.concatenate([choices_of(tokens) for tokens in responses])
    (replaying, same), (alone, own) = (trained(replica, prompts, responses, replay=replay) for replay in (True, False))
    np.testing.assert_array_equal(same, rollout)
    others = (np.sort(own, axis=-1) != np.sort(rollout, axis=-1)).any(axis=(1, 2)).mean()
    means = [float(each.abs().mean()) for each in (replaying, alone)]
    print(
        f"other experts for {others:.1%} of the inputs; mean difference of log-probs {means[0]:.4f}, without replay {means[1]:.4f}"
    )
    assert others > 0
    assert means[0] < means[1]
    assert means[0] <= 0.02


def test_the_parts_of_a_sequence_have_the_rows_of_the_whole(replica: Replica) -> None:
    prompt = prompt_of(20)
    names = replica.submit(prompt, 14, samples=8)
    reported: dict[SequenceId, list[GeneratedTokens]] = {name: [] for name in names}
    whole: dict[SequenceId, GeneratedTokens] = {}
    for steps in (1, 2, 1, 3):
        whole |= {name: completed.tokens for name, completed in replica.steps(steps).items()}
        for name, tokens in replica.engine.progress().items():
            reported[name].append(tokens)
    whole |= replica.engine.take(names[:4])
    whole |= {name: completed.tokens for name, completed in replica.finish().items()}
    assert max(map(len, reported.values())) == 4
    for name in names:
        assert_complete(replica, prompt, whole[name])
        done = sum(map(len, reported[name]))
        parts = [part for part in (*reported[name], whole[name][done:]) if len(part)]
        assert [len(choices_of(part)) - len(part) for part in parts] == [len(prompt) - 1, *[0] * (len(parts) - 1)]
        ends = np.cumsum([len(part) for part in parts]).tolist()
        tables = [(choices_of(part), end) for part, end in zip(parts, ends, strict=True)]
        by_trainer = replayed(tables, prompt=len(prompt), response=len(whole[name]))
        np.testing.assert_array_equal(by_trainer, choices_of(whole[name]))


def test_a_continued_sequence_has_rows_for_its_new_tokens(replica: Replica) -> None:
    """The tokens with which it is submitted have no choices, as in the rollout worker."""
    prompt = lasting_prompt(replica, 5, 12)
    [name] = replica.submit(prompt, 12, GREEDY)
    replica.steps(4)
    before = replica.engine.take([name])[name]
    [again] = replica.submit(prompt, 12, GREEDY, kept=replace(before, choices=None))
    replica.steps(3)
    [part] = replica.engine.progress().values()
    tokens = replica.finish()[again].tokens
    assert_complete(replica, prompt, tokens)
    rest = tokens[len(before) :]
    assert (len(part), len(choices_of(part)), len(choices_of(rest))) == (3, 3, len(rest))
    np.testing.assert_array_equal(choices_of(rest)[:3], choices_of(part))
    compared = Compared()
    logits = library_logits(replica.models[0], inputs_of(prompt, tokens))
    compared.add(np.concatenate((choices_of(before), choices_of(rest))), logits)
    assert compared.equal_share > 0.9, compared


def test_a_sequence_that_is_taken_before_its_first_token_has_no_rows(replica: Replica) -> None:
    replica.submit(prompt_of(5), 50, samples=SLOTS)
    [name] = replica.submit(prompt_of(5), 4)
    replica.steps(1)
    taken = replica.engine.take([name])[name]
    assert (len(taken), taken.choices) == (0, None)


def test_a_long_prompt_has_the_rows_of_all_its_steps_and_those_of_cached_blocks(replica: Replica) -> None:
    """The prefix cache belongs to a version: after new weights, no row of the earlier ones returns."""
    prompt = prompt_of(LONG, seed=6)
    for seed in (0, 1):
        replica.load(seed)
        [name] = replica.submit(prompt, 3)
        steps = [replica.engine.step()]
        while not steps[-1].started:
            steps.append(replica.engine.step())
        assert len(steps) > 1
        ended = [completed.tokens for completed in steps[-1].finished]  # if its first token ended it
        first = ended[0] if ended else replica.engine.take([name])[name]
        replica.submit(prompt, 3, samples=3)
        steps = []
        while replica.engine.busy:
            steps.append(replica.engine.step())
        prefilled = sum(step.prefilled for step in steps)
        assert 0 < prefilled < 3 * (LONG - 100)
        cached = LONG - prefilled // 3
        others = [completed.tokens for step in steps for completed in step.finished]
        assert len(others) == 3
        assert_like_the_library(replica, prompt, [first, *others], seed)
        for each in others:
            np.testing.assert_array_equal(choices_of(each)[:cached], choices_of(first)[:cached])


def test_samples_that_start_together_share_the_rows_of_their_prompt(replica: Replica) -> None:
    """Those after the first begin with blocks that the first fills in the same step."""
    prompt = prompt_of(LONG, seed=7)
    names = replica.submit(prompt, 2, samples=4)
    finished = replica.finish()
    assert_like_the_library(replica, prompt, [finished[name].tokens for name in names], 0)


def test_rows_are_those_of_the_weights_that_computed_the_tokens(replica: Replica) -> None:
    prompt = prompt_of(12, seed=3)
    running = replica.submit(prompt, 16, samples=SLOTS)
    waiting = replica.submit(prompt, 6, samples=SLOTS)
    finished = replica.steps(4)
    new = replica.load(1)
    finished |= replica.finish()
    compared, of_old_weights = Compared(), Compared()
    crossing = 0
    for name in running:
        tokens = finished[name].tokens
        assert_complete(replica, prompt, tokens)
        seeds = [int(version == new) for version in tokens.versions.tolist()]
        if len(set(seeds)) == 2 and crossing < 4:
            crossing += 1
            changed = len(prompt) - 1 + seeds.index(1)
            old, exact = (
                replayed_logits(replica.models, MAX_LENGTH, each, prompt, tokens.ids.tolist())
                for each in ([0] * len(seeds), seeds)
            )
            compared.add(choices_of(tokens), exact)
            of_old_weights.add(choices_of(tokens)[changed:], old[changed:])
    assert crossing == 4
    print(compared, of_old_weights)
    assert compared.equal_share > 0.9
    assert of_old_weights.equal_share < 0.6
    late = [finished[name].tokens for name in waiting if set(finished[name].tokens.versions.tolist()) == {new}]
    assert len(late) > 2, "most had no slot before the change"
    assert_like_the_library(replica, prompt, late, 1)


def test_what_vllm_computes_again_changes_no_row_of_earlier_tokens(replica: Replica) -> None:
    """vLLM preempts all sequences, after new weights that would choose other experts."""
    prompt = prompt_of(200)
    replica.submit(prompt, 12, samples=6)
    replica.steps(6)
    before = replica.engine.progress()
    replica.load(1)
    assert replica.core.engine_core.reset_prefix_cache(True)
    finished = replica.finish()
    assert before.keys() == finished.keys()
    compared = Compared()
    for name, part in before.items():
        tokens, computed = finished[name].tokens, len(choices_of(part))
        assert_complete(replica, prompt, tokens)
        np.testing.assert_array_equal(choices_of(tokens)[:computed], choices_of(part))
        logits = library_logits(replica.models[1], inputs_of(prompt, tokens))
        compared.add(choices_of(tokens)[computed:], logits[computed:])
    assert compared.choices > 20
    assert compared.equal_share > 0.8, compared


def test_a_probe_records_nothing(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    client = replica.core.engine_core
    get_output = client.get_output
    recorded: dict[str, bool] = {}

    def watched() -> Any:
        outputs = get_output()
        recorded.update({output.request_id: output.routed_experts is not None for output in outputs.outputs})
        return outputs

    monkeypatch.setattr(client, "get_output", watched)
    names = replica.submit(prompt_of(5), 6, samples=2)
    replica.engine.probe([np.array(prompt_of(9), np.int32)])
    finished = replica.finish()
    for name in names:
        assert_complete(replica, prompt_of(5), finished[name].tokens)
    assert len(recorded) == 3
    assert all(has_rows != name.startswith("probe-") for name, has_rows in recorded.items())


def test_an_engine_that_does_not_record_returns_no_rows(replica: Replica) -> None:
    config = replica.models[0].config
    engine = VLLMEngine(replica.core, config, end_token=END, max_length=MAX_LENGTH, on_cpu=True)
    load(engine, replica.weights(0), 1)
    [completed] = Replica(engine, replica.core, replica.models, set()).generate(prompt_of(5), 3)
    assert completed.tokens.choices is None


def test_a_record_returns_its_last_rows_in_the_smallest_type() -> None:
    for experts, kind in ((256, np.uint8), (257, np.uint16)):
        record = ChoiceRecord(RouterSizes(layers=2, experts=experts, chosen=3))
        assert record.all() is None
        rows = np.random.default_rng(0).integers(experts, size=(7, 2, 3)).astype(kind)
        record.add(rows[:5])
        record.add(rows[5:6])
        record.add(rows[6:])
        whole = record.all()
        assert whole is not None
        for part, expected in ((whole, rows), (record.last(1), rows[6:]), (record.last(4), rows[3:])):
            assert part.dtype == kind
            np.testing.assert_array_equal(part, expected)
    with pytest.raises(RuntimeError, match="was not built to record them"):
        record.add(None)


def test_a_step_whose_layers_do_not_all_report_is_an_error() -> None:
    step = RoutedStep(8, (2, 3), np.dtype(np.uint16), "cpu")
    chosen = torch.tensor([[300, 1, 2], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    step.inputs = 2  # the third only fills a graph
    step.record(0, chosen)
    step.record(1, chosen.flip(1))
    rows = step.take()
    assert rows.dtype == np.uint16
    assert rows.tolist() == [[[300, 1, 2], [2, 1, 300]], [[4, 5, 6], [6, 5, 4]]]
    step.record(1, chosen)
    with pytest.raises(RuntimeError, match=r"without recording the experts of layers \[0\]"):
        step.take()


def test_a_request_that_uses_a_part_of_a_cached_block_gets_its_rows() -> None:
    """vLLM 0.32 copies the block before the step, and the request continues in the copy."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    scheduler = Scheduler(spec, {"first": [2, 0], "second": [1]})
    table = ChoiceTable(scheduler, RouterSizes(layers=1, experts=300, chosen=1))
    table.attach()
    assert scheduler.step({"first": (0, 6, 6)}, range(100, 106)) == {"first": [*range(100, 106)]}
    copies = [SimpleNamespace(src_block_id=2, dst_block_id=1)]
    starts = {"second": (3, 4, 4), "first": (6, 7, 7)}
    scheduler.tokens["first"] = 1
    assert scheduler.step(starts, [200, 201], copies) == {"second": [100, 101, 102, 200], "first": [201]}


def test_blocks_that_a_connector_fills_have_no_rows_and_are_refused() -> None:
    """Such as those that `kv_offloading_size` brings back from host memory."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    scheduler: Any = Scheduler(spec, {})
    scheduler.connector = object()
    with pytest.raises(ValueError, match="remove kv_offloading_size"):
        ChoiceTable(scheduler, RouterSizes(layers=1, experts=300, chosen=1))


class Scheduler:
    """Stands in for vLLM's: requests with given blocks, and steps with given experts."""

    def __init__(self, spec: Any, blocks: Mapping[str, Sequence[int]]) -> None:
        self.kv_cache_config = SimpleNamespace(num_blocks=3, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        self.kv_cache_manager = self
        self.blocks = blocks
        self.tokens = dict.fromkeys(blocks, 0)
        """Number of generated tokens of each request."""
        self.requests: dict[str, Any] = {}

    def get_blocks(self, name: str) -> Any:
        return SimpleNamespace(blocks=[[SimpleNamespace(block_id=number) for number in self.blocks[name]]])

    def schedule(self, scheduled: Any) -> Any:
        return scheduled

    def update_from_output(self, scheduled: Any, _: Any) -> dict[int, Any]:
        outputs = [SimpleNamespace(request_id=name, routed_experts=None) for name in scheduled.num_scheduled_tokens]
        return {0: SimpleNamespace(outputs=outputs)}

    def step(
        self, spans: Mapping[str, tuple[int, int, int]], experts: Sequence[int], copies: Sequence[Any] = ()
    ) -> dict[str, list[int]]:
        """spans: start and end of the inputs that are computed, and the number of tokens of the request."""
        for name, (_, end, tokens) in spans.items():
            self.requests[name] = SimpleNamespace(
                is_prefill_chunk=end < tokens,
                num_tokens=tokens,
                num_output_tokens=self.tokens[name],
                num_output_placeholders=0,
                sampling_params=SimpleNamespace(prompt_logprobs=None),
            )
        counts = {name: end - start for name, (start, end, _) in spans.items()}
        scheduled = SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(spans), num_computed_tokens=[start for start, _, _ in spans.values()]
            ),
            kv_cache_block_copies=list(copies),
        )
        output = SimpleNamespace(req_ids=list(spans))
        setattr(output, STEP_CHOICES, np.array(experts, np.uint16)[:, None, None])
        [of_client] = self.update_from_output(self.schedule(scheduled), output).values()
        return {each.request_id: each.routed_experts.flatten().tolist() for each in of_client.outputs}


@pytest.mark.soak
def test_prompts_with_pictures_have_the_rows_of_the_text_models_routers() -> None:
    model = pictured(0, {"experts": EXPERTS, "expertsPerToken": CHOSEN})
    with engine_of(model.config, picture_tokens=MAX_LENGTH, records_choices=True) as (engine, core):
        replica = Replica(engine, core, {0: model}, set())
        replica.load(0)
        scenes = {(group, 0): shown for group, shown in enumerate(shown_scenes())}
        assert engine.submit([shown.request(*name) for name, shown in scenes.items()]) == ()
        finished = replica.finish()
        compared = Compared()
        for name, shown in scenes.items():
            tokens = finished[name].tokens
            assert_complete(replica, shown.tokens.tolist(), tokens)
            with collected_logits(model) as logits:
                scored_by_the_library(model, shown, tokens.ids)
            compared.add(choices_of(tokens), torch.stack(logits, 1)[:-1])
    assert compared.clear_share > 0.6
    assert compared.equal_share > 0.9, compared
