"""Decoding token by token against whole forward passes of the library's model."""

import pytest
import torch
from torch import Tensor

from qwen35_trainer.models.qwen3_5.adapter import adapt
from qwen35_trainer.models.qwen3_5.decoder import Decoder
from tests.models.scenes import vision_language

EXPERTS = [pytest.param(0, id="dense"), pytest.param(4, id="mixture of experts")]
PROMPTS, TOTAL = [2, 9, 66], 72


def references(model, sequences: list[Tensor]) -> list[Tensor]:
    """Logits (T, V) at every position of each sequence, each computed alone."""
    with torch.no_grad():
        return [model(input_ids=sequence[None], use_cache=False).logits[0] for sequence in sequences]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("experts", EXPERTS)
def test_every_position_of_ragged_sequences_has_the_logits_of_a_whole_forward(make_model, tokens, experts):
    model = make_model(experts=experts)
    sequences = [tokens(TOTAL, seed=seed) for seed in range(3)]
    expected = references(model, sequences)
    decoder = Decoder(model, slots=4, max_length=TOTAL + 1)
    prompts = [sequence[:length].tolist() for sequence, length in zip(sequences, PROMPTS, strict=True)]
    close(
        decoder.prefill(prompts, [[0], [1], [2]]),
        torch.stack([e[n - 1] for e, n in zip(expected, PROMPTS, strict=True)]),
    )
    for step in range(TOTAL - max(PROMPTS)):
        at = [length + step for length in PROMPTS]
        logits = decoder.step(torch.stack([s[i] for s, i in zip(sequences, at, strict=True)]))
        close(logits, torch.stack([e[i] for e, i in zip(expected, at, strict=True)]))


def test_the_samples_of_one_prompt_share_its_state_and_then_part(make_model, tokens):
    model = make_model()
    prompt, endings = tokens(40), [tokens(5, seed=seed) for seed in (1, 2, 3)]
    expected = references(model, [torch.cat((prompt, ending)) for ending in endings])
    decoder = Decoder(model, slots=3, max_length=64)
    logits = decoder.prefill([prompt.tolist()], [[0, 1, 2]])
    close(logits[0], expected[0][39])
    for t in range(5):
        close(decoder.step(torch.stack([e[t] for e in endings])), torch.stack([e[40 + t] for e in expected]))


def test_a_later_prompt_joins_running_sequences_without_disturbing_them(make_model, tokens):
    model = make_model()
    first, second = tokens(30, seed=1), tokens(50, seed=2)
    expected = references(model, [first, second])
    decoder = Decoder(model, slots=2, max_length=64)
    decoder.prefill([first[:20].tolist()], [[0]])
    decoder.step(first[20:21])
    close(decoder.prefill([second[:45].tolist()], [[1]])[0], expected[1][44])
    logits = decoder.step(torch.stack((first[21], second[45])))
    close(logits, torch.stack((expected[0][21], expected[1][45])))


def test_a_moved_sequence_continues_as_if_it_had_stayed(make_model, tokens):
    model = make_model()
    sequences = [tokens(40, seed=seed) for seed in range(4)]
    expected = references(model, sequences)
    decoder = Decoder(model, slots=4, max_length=48)
    decoder.prefill([s[:n].tolist() for s, n in zip(sequences, (5, 30, 8, 17), strict=True)], [[0], [1], [2], [3]])
    decoder.move(torch.tensor([3, 2]), torch.tensor([0, 1]))  # sequences 0 and 1 have ended
    close(
        decoder.step(torch.stack((sequences[3][17], sequences[2][8]))), torch.stack((expected[3][17], expected[2][8]))
    )
    close(
        decoder.step(torch.stack((sequences[3][18], sequences[2][9]))), torch.stack((expected[3][18], expected[2][9]))
    )


def test_a_slot_used_again_remembers_nothing_of_its_former_sequence(make_model, tokens):
    model = make_model()
    former, later = tokens(60, seed=1), tokens(20, seed=2)
    expected = references(model, [later])[0]
    decoder = Decoder(model, slots=1, max_length=64)
    decoder.prefill([former.tolist()], [[0]])
    close(decoder.prefill([later[:3].tolist()], [[0]])[0], expected[2])
    for t in range(3, 20):
        close(decoder.step(later[t : t + 1])[0], expected[t])


def test_after_a_load_the_next_token_comes_from_old_state_and_new_weights(make_model, tokens):
    """The library's own cache, filled by the old weights and continued by the new ones, is the reference."""
    old, new = make_model(seed=1), make_model(seed=2)
    sequence = tokens(50)
    decoder = Decoder(old, slots=1, max_length=64)
    decoder.prefill([sequence[:40].tolist()], [[0]])
    with torch.no_grad():
        cache = old(input_ids=sequence[None, :40], use_cache=True).past_key_values
        from_old_alone = old(input_ids=sequence[None], use_cache=False).logits[0]
        from_new_alone = new(input_ids=sequence[None], use_cache=False).logits[0]
        old.load_state_dict(new.state_dict())
        for t in range(40, 50):
            logits = decoder.step(sequence[t : t + 1])[0]
            output = old(input_ids=sequence[None, t : t + 1], past_key_values=cache, use_cache=True)
            close(logits, output.logits[0, -1])
            assert (logits - from_old_alone[t]).abs().max() > 1e-2
            assert (logits - from_new_alone[t]).abs().max() > 1e-2


@pytest.mark.parametrize("experts", EXPERTS)
def test_the_text_part_of_a_vision_language_model_decodes_as_its_whole_forward(tokens, experts):
    model, sequence = vision_language(experts=experts), tokens(30) % 19  # no placeholders of pictures
    with torch.no_grad():
        expected = model(input_ids=sequence[None], use_cache=False).logits[0]
    decoder = Decoder(model, slots=1, max_length=32)
    close(decoder.prefill([sequence[:20].tolist()], [[0]])[0], expected[19])
    for t in range(20, 30):
        close(decoder.step(sequence[t : t + 1])[0], expected[t])


def test_an_adapted_model_decodes_as_the_library_s(make_model, tokens):
    model, sequence = make_model(), tokens(30)
    [expected] = references(model, [sequence])
    decoder = Decoder(adapt(model), slots=1, max_length=32)
    close(decoder.prefill([sequence[:20].tolist()], [[0]])[0], expected[19])
    close(decoder.step(sequence[20:21])[0], expected[20])


def test_logits_that_are_wanted_in_float32_are_not_rounded_to_the_models_precision(make_model, tokens):
    model, prompt = make_model().bfloat16(), [tokens(20).tolist()]
    rounded, whole = (
        Decoder(model, 1, 32, float32_logits=float32_logits).prefill(prompt, [[0]]) for float32_logits in (False, True)
    )
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert torch.equal(rounded, whole.bfloat16().float())
    assert not torch.equal(rounded, whole)
