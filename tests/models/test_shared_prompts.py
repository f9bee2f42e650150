"""A row in which responses continue one prompt, against the library's model of each sequence alone."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

from qwen35_trainer.data.picture_arrays import PictureArrays
from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.inputs import ModelInput
from qwen35_trainer.models.qwen3_5.multimodal import multimodal_input
from qwen35_trainer.models.qwen3_5.packing import PackingInexact, check_packing
from qwen35_trainer.models.qwen3_5.shared_prompts import SharedPrompts
from tests.models import kernels_stand_in
from tests.models.scenes import as_the_library_wants, show, vision_language

EXPERTS = pytest.mark.parametrize("experts", [pytest.param(0, id="dense"), pytest.param(4, id="mixture of experts")])
PROMPTS = [70, 70, 70, 1, 1, 4, 2, 2]
RESPONSES = [5, 66, 1, 3, 9, 6, 0, 2]
LEADERS = [0, 0, 0, 3, 3, 5, 6, 6]
"""Three responses to a prompt longer than a kernel's chunk, two to a prompt of one token, one to a prompt of its own, and two to
a prompt that is shorter than the convolution. One of these has no token that the model reads."""
GRADIENT = 1e-4
"""Allowed difference of gradients, relative to the largest entry of a parameter's gradient."""
LENGTHS = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


def sequences_of(prompts: Sequence[Tensor], draw: Any) -> list[Tensor]:
    return [torch.cat((prompts[LEADERS[i]], draw(n, seed=20 + i) % 19)) for i, n in enumerate(RESPONSES)]


def rows_of_packed() -> tuple[Tensor, Tensor]:
    """The tokens of packed separate sequences that have a next token, and which tokens are the next ones."""
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    rows = torch.cat([torch.arange(length - 1) + start for start, length in zip(starts, LENGTHS, strict=False)])
    return rows, rows + 1


def weights(count: int) -> Tensor:
    return torch.linspace(-1, 2, count)


def agree(model: Any, library: Any, inputs: ModelInput, expected: Tensor, targets: Tensor, **settings: Any) -> None:
    """Log-probs, and the gradient of their weighted sum for every parameter."""
    assert inputs.shared is not None
    rows, _ = rows_of_packed()
    scores = model(inputs, inputs.shared.places[rows], targets, **settings)
    torch.testing.assert_close(scores.log_probs, expected.detach(), atol=1e-5, rtol=1e-5)
    (scores.log_probs * weights(len(rows))).sum().backward()
    (expected * weights(len(rows))).sum().backward()
    for (name, own), theirs in zip(model.named_parameters(), library.parameters(), strict=True):
        compare(name, own.grad, theirs.grad)


def compare(name: str, own: Tensor, expected: Tensor) -> None:
    """Two gradients of a parameter, relative to the largest entry."""
    apart = float((own - expected).abs().max())
    assert apart <= GRADIENT * float(expected.abs().max()) + 1e-7, (
        f"{name}: {apart}, largest {float(expected.abs().max())}"
    )


def log_probs_of(model: Any, sequences: Sequence[Tensor], pictures: Sequence[PictureArrays | None]) -> Tensor:
    scored = []
    for tokens, shown in zip(sequences, pictures, strict=True):
        arguments = {"input_ids": tokens[None], "use_cache": False}
        logits = model(**(arguments if shown is None else as_the_library_wants(tokens, shown))).logits[0, :-1]
        scored.append(logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1))
    return torch.cat(scored)


@EXPERTS
@pytest.mark.parametrize("with_kernels", [False, True], ids=["split", "kernels"])
def test_scores_and_gradients_are_the_librarys_of_each_sequence(make_model, tokens, monkeypatch, experts, with_kernels):
    if with_kernels:
        kernels_stand_in.install(monkeypatch)
    sequences = sequences_of([tokens(n, seed=n) for n in PROMPTS], tokens)
    shared = SharedPrompts.of(PROMPTS, LENGTHS, LEADERS)
    inputs = ModelInput.of_text(sequences, packed=True, device="cpu").sharing(shared)
    assert inputs.tokens.numel() == sum(LENGTHS) - 70 * 2 - 1 - 2
    library = make_model(experts=experts)
    expected = log_probs_of(library, sequences, [None] * len(sequences))
    agree(adapt(make_model(experts=experts)), library, inputs, expected, torch.cat(sequences)[rows_of_packed()[1]])


@EXPERTS
def test_responses_to_pictures_continue_at_the_pictures_positions(tokens, experts) -> None:
    scenes: dict[int, list[Any]] = {0: [20, (1, 4, 6), 9, (1, 2, 2), 31], 5: [4], 6: [1, ("video", (2, 4, 2))]}
    # A prompt of one token shows nothing, and the last prompt ends with a video.
    shown = {leader: show(scene, leader) for leader, scene in scenes.items()} | {3: (torch.tensor([2]), None)}
    prompts = [shown[leader][0] for leader in LEADERS]
    pictures = [shown[leader][1] if leader in (0, 6) else None for leader in LEADERS]
    sequences = [
        torch.cat((prompt, tokens(n, seed=20 + i) % 19))
        for i, (prompt, n) in enumerate(zip(prompts, RESPONSES, strict=True))
    ]
    lengths = [len(each) for each in sequences]
    shared = SharedPrompts.of([len(each) for each in prompts], lengths, LEADERS)
    model, library = vision_language(experts=experts), vision_language(experts=experts)
    inputs = multimodal_input(sequences, pictures, model.config, shared=shared, packed=True, device="cpu")
    assert inputs.pictures is not None
    assert len(inputs.pictures.grids) == 2
    assert len(inputs.pictures.video_grids) == 1
    expected = log_probs_of(library, sequences, pictures)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.cat([torch.arange(length - 1) + start for start, length in zip(starts, lengths, strict=False)])
    scores = adapt(model)(inputs, shared.places[rows], torch.cat(sequences)[rows + 1])
    torch.testing.assert_close(scores.log_probs, expected.detach(), atol=2e-5, rtol=1e-5)
    (scores.log_probs * weights(len(rows))).sum().backward()
    (expected * weights(len(rows))).sum().backward()
    for (name, own), theirs in zip(model.named_parameters(), library.parameters(), strict=True):
        compare(name, own.grad, theirs.grad)


def test_a_prompts_token_counts_in_the_losses_of_routers_once_for_each_of_its_sequences(make_model, tokens) -> None:
    sequences = sequences_of([tokens(n, seed=n) for n in PROMPTS], tokens)
    inputs = ModelInput.of_text(sequences, packed=True, device="cpu").sharing(
        SharedPrompts.of(PROMPTS, LENGTHS, LEADERS)
    )
    model, library, seen = adapt(make_model(experts=4)), make_model(experts=4), []
    for layer in library.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: seen.append(output[0]))
    for sequence in sequences:
        library(input_ids=sequence[None], use_cache=False)
    top_k, layers = library.config.num_experts_per_tok, len(library.model.layers)
    balance = sum(len(routed) / top_k * load_balancing_loss_func((routed,), 4, top_k) for routed in seen)
    z = sum(routed.logsumexp(-1).square().sum() for routed in seen)
    assert len(seen) == layers * len(sequences)
    losses = model(inputs, torch.tensor([0]), torch.tensor([0]), lengths=torch.tensor(LENGTHS)).router_losses
    torch.testing.assert_close(losses, torch.stack((balance, z)), atol=1e-4, rtol=1e-5)
    (losses * torch.tensor([0.5, 0.1])).sum().backward()
    (0.5 * balance + 0.1 * z).backward()
    for (name, own), theirs in zip(model.named_parameters(), library.parameters(), strict=True):
        if theirs.grad is not None:
            compare(name, own.grad, theirs.grad)


@EXPERTS
@pytest.mark.parametrize("with_kernels", [False, True], ids=["split", "kernels"])
def test_a_row_of_responses_of_one_token_has_nothing_that_continues_a_prompt(
    make_model, tokens, monkeypatch, experts, with_kernels
):
    """The last token of each prompt predicts every response to it."""
    if with_kernels:
        kernels_stand_in.install(monkeypatch)
    lengths, leaders, targets = [70, 70, 3, 3], [0, 0, 2, 2], torch.tensor([4, 5, 6, 4])
    sequences = [tokens(lengths[leader], seed=leader) for leader in leaders]
    shared = SharedPrompts.of(lengths, lengths, leaders)
    assert shared is not None
    assert shared.prompts == (None, None)
    inputs = ModelInput.of_text(sequences, packed=True, device="cpu").sharing(shared)
    assert inputs.tokens.numel() == 73
    model, library = adapt(make_model(experts=experts)), make_model(experts=experts)
    expected = torch.stack(
        [
            library(input_ids=sequence[None], use_cache=False).logits[0, -1].log_softmax(-1)[target]
            for sequence, target in zip(sequences, targets, strict=True)
        ]
    )
    scores = model(inputs, shared.places[torch.tensor(lengths).cumsum(0) - 1], targets)
    torch.testing.assert_close(scores.log_probs, expected.detach(), atol=1e-5, rtol=1e-5)
    (scores.log_probs * weights(4)).sum().backward()
    (expected * weights(4)).sum().backward()
    for (name, own), theirs in zip(model.named_parameters(), library.parameters(), strict=True):
        compare(name, own.grad, theirs.grad)


def test_the_row_of_the_docstring() -> None:
    shared = SharedPrompts.of([4, 4, 2], [7, 6, 3], [0, 0, 2])
    assert shared is not None
    assert shared.lengths == (4, 3, 2, 3)
    assert shared.prompts == (None, 0, 0, None)
    assert shared.last_segments == (1, 2, 3)
    assert shared.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15]
    assert shared.places.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 10, 11]
    assert shared.contained.tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]


def test_sequences_with_prompts_of_their_own_share_nothing() -> None:
    assert SharedPrompts.of([4, 4], [7, 6], [0, 1]) is None


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=4)), min_size=1, max_size=4
    ),
    order=st.randoms(use_true_random=False),
)
def test_every_sequence_finds_its_tokens_in_the_row_and_each_prompt_is_there_once(groups, order) -> None:
    """Also if the samples of a group are not adjacent."""
    samples = [(number, prompt, response) for number, (prompt, all_) in enumerate(groups) for response in all_]
    order.shuffle(samples)
    leaders = [next(i for i, each in enumerate(samples) if each[0] == number) for number, _, _ in samples]
    lengths = [prompt + response for _, prompt, response in samples]
    shared = SharedPrompts.of([prompt for _, prompt, _ in samples], lengths, leaders)
    if shared is None:
        assert len(set(leaders)) == len(leaders)
        return
    names = [
        (number, i) if i < prompt else (number, i, sample)
        for sample, (number, prompt, response) in enumerate(samples)
        for i in range(prompt + response)
    ]
    row = [names[token] for token in shared.tokens.tolist()]
    assert [row[place] for place in shared.places.tolist()] == names
    assert len(set(row)) == len(row) == sum(shared.lengths)


@EXPERTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_at_load_accepts_shared_prompts(make_model, experts, dtype) -> None:
    check_packing(adapt(make_model(experts=experts).to(dtype)), share_prompts=True)


def test_the_check_at_load_accepts_shared_pictures() -> None:
    check_packing(adapt(vision_language()), pictures=True, share_prompts=True)


def rule(
    fault: str, *tensors: Tensor, cu_seqlens: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """The kernel with a fault: it ignores the state, or gives the state no gradient."""
    state = settings.pop("initial_state", None)
    if state is not None:
        state = {"empty": torch.zeros_like, "constant": Tensor.detach}[fault](state)
    return kernels_stand_in.chunk_gated_delta_rule(*tensors, cu_seqlens=cu_seqlens, initial_state=state, **settings)


@pytest.mark.parametrize("fault", ["empty", "constant"])
def test_a_kernel_that_loses_the_state_of_the_prompt_is_refused(make_model, monkeypatch, fault) -> None:
    kernels_stand_in.install(monkeypatch, delta_rule=partial(rule, fault))
    model = adapt(make_model())
    check_packing(model)
    with pytest.raises(PackingInexact, match=r"shared prompts is not exact here, from copies .*sharePrompts to false"):
        check_packing(model, share_prompts=True)


def test_an_attention_kernel_that_aligns_queries_with_the_first_keys_is_refused(make_model, monkeypatch) -> None:
    def first_keys(*arguments: Any, **settings: Any) -> Tensor:
        query, key, value, starts, key_starts, *_ = arguments
        if torch.equal(starts, key_starts):
            return kernels_stand_in.varlen_attn(*arguments, **settings)
        lengths = zip(key_starts[:-1].tolist(), starts.diff().tolist(), strict=True)
        kept = torch.cat([torch.arange(start, start + length) for start, length in lengths])
        longest = int(starts.diff().max())
        return kernels_stand_in.varlen_attn(query, key[kept], value[kept], starts, starts, longest, longest, **settings)

    kernels_stand_in.install(monkeypatch, attention=first_keys)
    with pytest.raises(PackingInexact, match="from copies of the prompt"):
        check_packing(adapt(make_model()), share_prompts=True)


def test_padding_for_context_parallelism_belongs_to_no_sequence() -> None:
    shared = SharedPrompts.of([2, 2], [3, 4], [0, 0])
    assert shared is not None
    padded = shared.padded(3)
    assert padded.lengths == (2, 1, 2, 3)
    assert padded.prompts == (None, 0, 0, None)
    assert padded.contained.tolist() == [[1, 1, 0, 0], [1, 0, 1, 0]]
    assert dataclasses.replace(padded, lengths=shared.lengths, prompts=shared.prompts).places is shared.places
