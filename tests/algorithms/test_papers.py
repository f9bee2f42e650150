"""Every loss, advantage and correction against its paper's formula, and their composition, in float64 and without tensors.

A loss is written here as a function of one sequence's log-probs, in which a second argument stands where the paper stops the
gradient. Its gradient is a central difference in the first argument alone.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from qwen35_trainer.algorithms.advantages import ADVANTAGES, AdvantageInputs, advantage
from qwen35_trainer.algorithms.corrections import CORRECTIONS, correction
from qwen35_trainer.algorithms.losses import LOSSES, LossInputs, policy_loss
from qwen35_trainer.algorithms.objective import Objective, needs_proximal, policy_objective
from tests.algorithms.whole_batch import counts_of

LOW, HIGH, DUAL, TAU_POSITIVE, TAU_NEGATIVE, DELTA = 0.2, 0.28, 3.0, 1.0, 1.05, 0.1
MAX_DPPO_RATIO, MAX_K3 = 20.0, 10.0
"""Bounds that the papers do not have; docs/algorithms.md and `algorithms/kl.py` describe them."""

type Numbers = Sequence[float]
type Reference = Callable[[Numbers, Numbers, Numbers, Numbers], list[float]]
"""(current log-probs, the same under the stop-gradient, old log-probs, advantages) of one sequence -> loss of each token."""


def ratios(current: Numbers, old: Numbers) -> list[float]:
    return [math.exp(p - q) for p, q in zip(current, old, strict=True)]


def clipped(ratio: float) -> float:
    return min(max(ratio, 1 - LOW), 1 + HIGH)


def surrogate(ratio: float, a: float) -> float:
    return -min(ratio * a, clipped(ratio) * a)


def ppo_clip(current, frozen, old, advantages):
    losses = [surrogate(r, a) for r, a in zip(ratios(current, old), advantages, strict=True)]
    return [min(loss, -DUAL * a) if a < 0 else loss for loss, a in zip(losses, advantages, strict=True)]


def gspo(current, frozen, old, advantages):
    # GSPO-token: sg[s] · π/sg[π].
    s = math.exp(statistics.fmean(p - q for p, q in zip(frozen, old, strict=True)))
    return [surrogate(s * r, a) for r, a in zip(ratios(current, frozen), advantages, strict=True)]


def cispo(current, frozen, old, advantages):
    weights = [clipped(r) for r in ratios(frozen, old)]
    return [-w * a * p for w, a, p in zip(weights, advantages, current, strict=True)]


def gpg(current, frozen, old, advantages):
    return [-a * p for a, p in zip(advantages, current, strict=True)]


def sapo(current, frozen, old, advantages):
    def gate(x: float, tau: float) -> float:
        return 4 / tau / (1 + math.exp(-tau * (x - 1)))

    taus = [TAU_POSITIVE if a > 0 else TAU_NEGATIVE for a in advantages]
    return [-gate(r, tau) * a for r, tau, a in zip(ratios(current, old), taus, advantages, strict=True)]


def dppo(divergence: Callable[[float, float], float]) -> Reference:
    def reference(current, frozen, old, advantages):
        losses = []
        for now, p, q, a in zip(current, frozen, old, advantages, strict=True):
            outside = divergence(math.exp(q), math.exp(p)) > DELTA
            leaves = (a > 0 and p > q) or (a < 0 and p < q)
            # The paper has the ratio itself: sg[r] · π/sg[π].
            truncated = min(math.exp(p - q), MAX_DPPO_RATIO) * math.exp(now - p)
            losses.append(0.0 if outside and leaves else -truncated * a)
        return losses

    return reference


def binary_kl(mu: float, pi: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


REFERENCES: dict[str, Reference] = {
    "PPOClip": ppo_clip,
    "GSPO": gspo,
    "CISPO": cispo,
    "GPG": gpg,
    "SAPO": sapo,
    "DPPOBinaryTV": dppo(lambda mu, pi: abs(mu - pi)),
    "DPPOBinaryKL": dppo(binary_kl),
}


def slopes(
    reference: Reference, current: Numbers, old: Numbers, advantages: Numbers, step: float = 1e-6
) -> list[float]:
    """The derivative of the sum of all losses by each current log-prob."""

    def total(at: int, by: float) -> float:
        moved = [p + by * (at == index) for index, p in enumerate(current)]
        return math.fsum(reference(moved, current, old, advantages))

    return [(total(at, step) - total(at, -step)) / (2 * step) for at in range(len(current))]


def random_sequences() -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Log-probs of two policies and advantages, (N, T), and the lengths: ratios from 0.2 to 5, advantages of both signs and 0."""
    generator = np.random.default_rng(11)
    shape = (40, 6)
    old = np.log(generator.uniform(0.02, 0.98, shape))
    current = np.minimum(old + generator.uniform(-1.6, 1.6, shape), -0.01)
    advantages = generator.normal(size=shape) * (generator.random(shape) > 0.1)
    return current, old, advantages, generator.integers(1, shape[1] + 1, shape[0]).tolist()


def test_each_registered_name_has_a_reference():
    assert set(REFERENCES) == set(LOSSES.names)
    assert set(ADVANTAGE_REFERENCES) == set(ADVANTAGES.names)
    assert set(WEIGHT_REFERENCES) == set(CORRECTIONS.names)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_loss_has_the_value_and_the_gradient_of_its_paper(name):
    current, old, advantages, lengths = random_sequences()
    mask = torch.tensor([[position < length for position in range(current.shape[1])] for length in lengths])
    log_probs = torch.tensor(current, requires_grad=True)
    out = policy_loss(name)(
        LossInputs(
            log_probs,
            torch.tensor(old),
            torch.tensor(advantages),
            mask,
            LOW,
            HIGH,
            DUAL,
            TAU_POSITIVE,
            TAU_NEGATIVE,
            DELTA,
        )
    )
    (gradient,) = torch.autograd.grad(out.per_token.sum(), log_probs)
    assert out.per_token.dtype == torch.float64
    for row, length in enumerate(lengths):
        of_row = [values[row, :length].tolist() for values in (current, old, advantages)]
        value = REFERENCES[name](of_row[0], *of_row)
        np.testing.assert_allclose(out.per_token[row, :length].detach(), value, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(gradient[row, :length], slopes(REFERENCES[name], *of_row), rtol=1e-6, atol=1e-8)


def whitened(values: list[list[float]]) -> list[list[float]]:
    tokens = [value for row in values for value in row]
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens)
    return [[(value - mean) / deviation for value in row] for row in values]


def per_sample(compute: Callable[[float, Numbers, list[tuple[float, int]]], float]):
    """The advantages of an estimator that gives all tokens of a sample the same.

    compute: (score, scores of the group's other samples, score and length of all samples of the group) -> advantage.
    """

    def reference(rewards, groups, lengths, penalties, values):
        scores = [reward - math.fsum(penalty) for reward, penalty in zip(rewards, penalties, strict=True)]
        result = []
        for index, (score, group) in enumerate(zip(scores, groups, strict=True)):
            members = [at for at, other in enumerate(groups) if other == group]
            others = [scores[at] for at in members if at != index]
            result.append([compute(score, others, [(scores[at], lengths[at]) for at in members])] * lengths[index])
        return result

    return reference


def returns(rewards, groups, lengths, penalties, values):
    gamma, result = 0.9, []
    for reward, penalty in zip(rewards, penalties, strict=True):
        tokens = [-each for each in penalty]
        tokens[-1] += reward
        result.append(
            [
                math.fsum(gamma**later * tokens[t + later] for later in range(len(tokens) - t))
                for t in range(len(tokens))
            ]
        )
    return whitened(result)


def gae(rewards, groups, lengths, penalties, values):
    gamma, lam, result = 0.9, 0.8, []
    for reward, penalty, value in zip(rewards, penalties, values, strict=True):
        tokens = [-each for each in penalty]
        tokens[-1] += reward
        delta = [r + gamma * after - before for r, before, after in zip(tokens, value, [*value[1:], 0.0], strict=True)]
        result.append(
            [
                math.fsum((gamma * lam) ** later * delta[t + later] for later in range(len(delta) - t))
                for t in range(len(delta))
            ]
        )
    return whitened(result)


def baseline(rewards, groups, lengths, penalties, values):
    return whitened(ADVANTAGE_REFERENCES["DrGRPO"](rewards, groups, lengths, penalties, values))


def greedy_samples(groups: Sequence[int]) -> dict[int, int]:
    """The greedy sample of each group, by group: its last one."""
    return {group: index for index, group in enumerate(groups)}


def remax(rewards, groups, lengths, penalties, values):
    greedy = greedy_samples(groups)
    scores = [reward - math.fsum(penalty) for reward, penalty in zip(rewards, penalties, strict=True)]
    return [
        [score - scores[greedy[group]]] * length for score, group, length in zip(scores, groups, lengths, strict=True)
    ]


def gpg_advantage(rewards, groups, lengths, penalties, values):
    # F_norm = 1 and α = B / (B - M) in the paper's notation, M of B groups having samples of one score only.
    scores = [reward - math.fsum(penalty) for reward, penalty in zip(rewards, penalties, strict=True)]
    of_groups = {group: {s for s, other in zip(scores, groups, strict=True) if other == group} for group in groups}
    alpha = len(of_groups) / (len(of_groups) - sum(len(each) == 1 for each in of_groups.values()))
    centred = ADVANTAGE_REFERENCES["DrGRPO"](rewards, groups, lengths, penalties, values)
    return [[alpha * a for a in row] for row in centred]


ADVANTAGE_REFERENCES = {
    "GRPO": per_sample(
        lambda r, others, _: (r - statistics.fmean([r, *others])) / (statistics.stdev([r, *others]) + 1e-6)
    ),
    "DrGRPO": per_sample(lambda r, others, _: r - statistics.fmean([r, *others])),
    "RLOO": per_sample(lambda r, others, _: r - statistics.fmean(others)),
    "OPO": per_sample(lambda r, _, members: r - sum(s * n for s, n in members) / sum(n for _, n in members)),
    "GPG": gpg_advantage,
    "ReMax": remax,
    "PassAtK": per_sample(lambda r, others, _: max(r, *others) - max(others)),
    "ReinforcePlusPlus": returns,
    "ReinforcePlusPlusBaseline": baseline,
    "GAE": gae,
}


@pytest.mark.parametrize("name", ADVANTAGE_REFERENCES)
@pytest.mark.parametrize("ties", [False, True])
def test_an_advantage_is_that_of_its_paper(name, ties):
    generator = np.random.default_rng(5)
    samples, width, size = 24, 7, 4
    groups = generator.permutation(np.repeat(np.arange(samples // size), size))
    rewards = generator.integers(0, 3, samples) / 1.0 if ties else generator.normal(size=samples)
    rewards[groups == 0] = [0.0, 0.25, 1.0, 1.0]
    if ties:  # equal scores give 0 by definition, where some of the formulas divide rounding noise by 1e-6
        for group in range(1, samples // size):
            rewards[np.flatnonzero(groups == group)[0]] = 3.0 + group
    lengths = generator.integers(1, width + 1, samples)
    tables = [generator.normal(size=(samples, width)) * scale for scale in (0.0 if ties else 0.1, 1.0)]
    mask = np.arange(width) < lengths[:, None]
    inputs = AdvantageInputs(
        rewards=torch.tensor(rewards),
        group=torch.tensor(groups),
        mask=torch.tensor(mask),
        token_penalty=torch.tensor(tables[0]),
        values=torch.tensor(tables[1]),
        baseline=torch.tensor(
            [greedy_samples(groups.tolist())[group] == at for at, group in enumerate(groups.tolist())]
        ),
        gamma=0.9,
        lam=0.8,
    )
    result = advantage(name)(inputs)
    rows = [[table[row, : lengths[row]].tolist() for row in range(samples)] for table in tables]
    expected = ADVANTAGE_REFERENCES[name](rewards.tolist(), groups.tolist(), lengths.tolist(), *rows)
    # Advantages are float32.
    for row, numbers in enumerate(expected):
        np.testing.assert_allclose(result[row, : lengths[row]], numbers, rtol=2e-5, atol=2e-6)
        assert result[row, lengths[row] :].count_nonzero() == 0


def test_gpg_has_the_loss_and_the_gradient_of_the_groups_with_signal():
    """The mean loss over the samples of a batch, corrected by α, is that over the samples of the groups with signal."""
    generator = np.random.default_rng(7)
    groups, size, width = 6, 4, 3
    rewards = generator.integers(0, 2, (groups, size)).astype(float)
    rewards[:2], rewards[2:, :2] = [[1.0], [0.0]], [0.0, 1.0]
    log_probs = np.log(generator.uniform(0.05, 0.9, (groups * size, width)))
    lengths = generator.integers(1, width + 1, groups * size)
    mask = np.arange(width) < lengths[:, None]
    held = torch.tensor(mask)
    advantages = advantage("GPG")(
        AdvantageInputs(torch.tensor(rewards).flatten(), torch.arange(groups).repeat_interleave(size), held)
    )
    current = torch.tensor(log_probs, requires_grad=True)
    objective = Objective("GPG", LOW, HIGH, None, "SequenceMeanTokenMean", "None", 0.0, "K3", 0.0, "None", CAP, FLOOR)
    value, _ = policy_objective(
        objective,
        log_probs=current,
        entropy=None,
        behaviour_log_probs=current.detach(),
        proximal_log_probs=None,
        reference_log_probs=None,
        advantages=advantages,
        mask=held,
        counts=counts_of(held, width),
    )
    expected, slopes_of_signal = 0.0, np.zeros_like(log_probs)
    for row in range(2 * size, groups * size):  # the first two groups have no signal
        of_group = rewards[row // size].tolist()
        weight = (of_group[row % size] - statistics.fmean(of_group)) / (lengths[row] * (groups - 2) * size)
        slopes_of_signal[row, : lengths[row]] = -weight
        expected -= weight * math.fsum(log_probs[row, : lengths[row]])
    assert value.item() == pytest.approx(expected, rel=1e-6)  # advantages are float32
    np.testing.assert_allclose(torch.autograd.grad(value, current)[0], slopes_of_signal, rtol=1e-6)


CAP, FLOOR = 2.0, 0.5
WEIGHT_REFERENCES: dict[str, Callable[[list[float]], list[float]]] = {
    "None": lambda r: [1.0] * len(r),
    "Recomputed": lambda r: [1.0] * len(r),
    "TokenTIS": lambda r: [min(each, CAP) for each in r],
    "DecoupledPPO": lambda r: [min(each, CAP) for each in r],
    "SequenceTIS": lambda r: [min(math.prod(r), CAP)] * len(r),
    "IcePop": lambda r: [each if FLOOR <= each <= CAP else 0.0 for each in r],
    "SequenceMask": lambda r: [float(FLOOR <= math.prod(r) ** (1 / len(r)) <= CAP)] * len(r),
}


@pytest.mark.parametrize("name", WEIGHT_REFERENCES)
def test_a_correction_has_the_weights_of_its_paper(name):
    proximal, behaviour, _, lengths = random_sequences()
    mask = torch.tensor([[position < length for position in range(proximal.shape[1])] for length in lengths])
    weights = correction(name)(torch.tensor(behaviour), torch.tensor(proximal), mask, CAP, FLOOR).weights
    for row, length in enumerate(lengths):
        expected = WEIGHT_REFERENCES[name](ratios(proximal[row, :length].tolist(), behaviour[row, :length].tolist()))
        np.testing.assert_allclose(weights[row, :length], expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["SAPO", "DPPOBinaryTV", "PPOClip"])
def test_with_a_correction_and_one_update_per_batch_no_gate_acts(name):
    """The ratio is then 1 for every token, as docs/algorithms.md says: the gradient is that of the plain policy gradient."""
    current, _, advantages, _ = random_sequences()
    log_probs = torch.tensor(current, requires_grad=True)
    mask = torch.ones(current.shape, dtype=torch.bool)
    inputs = LossInputs(
        log_probs,
        log_probs.detach(),
        torch.tensor(advantages),
        mask,
        LOW,
        HIGH,
        DUAL,
        TAU_POSITIVE,
        TAU_NEGATIVE,
        DELTA,
    )
    policy_loss(name)(inputs).per_token.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.numpy() == pytest.approx(-advantages, rel=1e-12)


KL_REFERENCES: dict[str, Callable[[float], float]] = {
    "K1": lambda d: d,
    "K2": lambda d: d * d / 2,
    "K3": lambda d: min(math.exp(-d) - 1 + d, MAX_K3),
}
AGGREGATION_REFERENCES: dict[str, Callable[[int, "Counted"], float]] = {
    "TokenMean": lambda length, all_of: 1 / all_of.tokens,
    "SequenceMeanTokenSum": lambda length, all_of: 1 / all_of.sequences,
    "SequenceMeanTokenMean": lambda length, all_of: 1 / (length * all_of.sequences),
    "SequenceMeanTokenSumNorm": lambda length, all_of: 1 / (all_of.sequences * all_of.width),
}
"""Name -> (trained tokens of a sequence, those of all sequences) -> weight of a token of the sequence."""
KL_COEFFICIENT, ENTROPY_COEFFICIENT = 0.3, 0.05


@dataclass(frozen=True)
class Counted:
    tokens: int
    sequences: int
    width: int


@dataclass(frozen=True)
class Trained:
    """The trained tokens of one sequence: log-probs of four policies, advantages and entropies."""

    current: Numbers
    behaviour: Numbers
    proximal: Numbers
    reference: Numbers
    advantages: Numbers
    entropy: Numbers


@dataclass(frozen=True)
class Composition:
    loss: str
    correction: str
    aggregation: str
    estimator: str
    recomputed: bool
    """Whether log-probs of the weights at the batch's start are passed. The current ones replace them otherwise."""


def composed(what: Composition, moved: Trained, sequence: Trained, all_of: Counted) -> float:
    """What a sequence adds to the loss of an update. moved: the sequence with the values that have the gradient."""
    proximal = sequence.proximal if what.recomputed else sequence.current
    weights = WEIGHT_REFERENCES[what.correction](ratios(proximal, sequence.behaviour))
    old = sequence.behaviour if what.correction == "None" else proximal
    policy = REFERENCES[what.loss](moved.current, sequence.current, old, sequence.advantages)
    divergence = [KL_REFERENCES[what.estimator](p - q) for p, q in zip(moved.current, sequence.reference, strict=True)]
    aggregation = "SequenceMeanTokenMean" if what.loss == "GSPO" else what.aggregation
    return AGGREGATION_REFERENCES[aggregation](len(policy), all_of) * math.fsum(
        weight * loss + KL_COEFFICIENT * kl - ENTROPY_COEFFICIENT * entropy
        for weight, loss, kl, entropy in zip(weights, policy, divergence, moved.entropy, strict=True)
    )


def composed_slopes(
    what: Composition, sequence: Trained, all_of: Counted, field: str, step: float = 1e-6
) -> list[float]:
    """The derivative of what a sequence adds by each of its current log-probs or entropies."""
    values = getattr(sequence, field)

    def at(index: int, by: float) -> float:
        moved = [value + by * (index == other) for other, value in enumerate(values)]
        return composed(what, replace(sequence, **{field: moved}), sequence, all_of)

    return [(at(index, step) - at(index, -step)) / (2 * step) for index in range(len(values))]


def composed_tables() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(N, T) numbers by the fields of `Trained`, and the mask, which has holes and a row without trained tokens."""
    generator = np.random.default_rng(23)
    shape = (7, 5)
    lengths = generator.integers(2, shape[1] + 1, shape[0])
    mask = (np.arange(shape[1]) < lengths[:, None]) & (generator.random(shape) < 0.8)
    mask[0, :4], mask[-1] = True, False
    behaviour = np.log(generator.uniform(0.05, 0.9, shape))
    proximal = np.minimum(behaviour + generator.uniform(-0.9, 0.9, shape), -0.02)
    current = np.minimum(proximal + generator.uniform(-1.2, 1.2, shape), -0.01)
    reference = current + generator.uniform(-1.5, 1.5, shape)
    advantages = generator.normal(size=shape)
    # Ratios above DPPO's bound: a likely token of low advantage, and an unlikely one within the trust region.
    behaviour[0, :2] = proximal[0, :2] = -4.5, -9.2
    current[0, :2], advantages[0, :2] = (-0.5, -3.5), (-1.5, 1.0)
    # K3 above its bound on both sides, and beyond the one of its exponent.
    reference[0, 1:4] = current[0, 1:4] + (4.0, -14.0, 25.0)
    tables = {
        "current": current,
        "behaviour": behaviour,
        "proximal": proximal,
        "reference": reference,
        "advantages": advantages,
        "entropy": generator.uniform(0, 2, shape),
    }
    return tables, mask


def compositions(loss: str) -> Iterator[Composition]:
    """Every correction with every aggregation, and each estimator of the KL divergence with each of these."""
    estimators = itertools.cycle(KL_REFERENCES)
    for correction_name in WEIGHT_REFERENCES:
        for aggregation in AGGREGATION_REFERENCES:
            yield Composition(loss, correction_name, aggregation, next(estimators), recomputed=True)
        if not needs_proximal(correction_name):
            yield Composition(loss, correction_name, "TokenMean", next(estimators), recomputed=False)


def test_the_composed_numbers_reach_every_bound():
    tables, mask = composed_tables()
    over_dppo = (tables["current"] - tables["proximal"])[mask] > math.log(MAX_DPPO_RATIO)
    assert over_dppo.sum() == 2
    distance = (tables["current"] - tables["reference"])[mask]
    assert {math.copysign(1, d) for d in distance if math.exp(-d) - 1 + d > MAX_K3} == {-1, 1}
    used = [what for loss in REFERENCES for what in compositions(loss)]
    for field in ("loss", "correction", "aggregation"):
        pairs = {(getattr(what, field), what.estimator) for what in used}
        assert len(pairs) == len({getattr(what, field) for what in used}) * len(KL_REFERENCES), field


@pytest.mark.parametrize("loss", REFERENCES)
def test_a_composed_objective_has_the_value_and_the_gradient_of_its_papers(loss):
    tables, mask = composed_tables()
    rows = [row for row in range(len(mask)) if mask[row].any()]
    sequences = [Trained(**{field: table[row][mask[row]].tolist() for field, table in tables.items()}) for row in rows]
    all_of = Counted(int(mask.sum()), len(rows), mask.shape[1])
    tensors = {field: torch.tensor(table) for field, table in tables.items()}
    for what in compositions(loss):
        log_probs, entropy = (tensors[field].clone().requires_grad_() for field in ("current", "entropy"))
        value, _ = policy_objective(
            Objective(
                loss=loss,
                clip_low=LOW,
                clip_high=HIGH,
                dual_clip=DUAL,
                aggregation=what.aggregation,
                kl_placement="Loss",
                kl_coefficient=KL_COEFFICIENT,
                kl_estimator=what.estimator,
                entropy_coefficient=ENTROPY_COEFFICIENT,
                correction=what.correction,
                cap=CAP,
                floor=FLOOR,
                tau_positive=TAU_POSITIVE,
                tau_negative=TAU_NEGATIVE,
                max_divergence=DELTA,
            ),
            log_probs=log_probs,
            entropy=entropy,
            behaviour_log_probs=tensors["behaviour"],
            proximal_log_probs=tensors["proximal"] if what.recomputed else None,
            reference_log_probs=tensors["reference"],
            advantages=tensors["advantages"],
            mask=torch.tensor(mask),
            counts=counts_of(torch.tensor(mask), mask.shape[1]),
        )
        expected = math.fsum(composed(what, sequence, sequence, all_of) for sequence in sequences)
        assert value.item() == pytest.approx(expected, rel=1e-12), what
        gradients = torch.autograd.grad(value, [log_probs, entropy])
        for gradient, field in zip(gradients, ("current", "entropy"), strict=True):
            slopes_by_row = [composed_slopes(what, sequence, all_of, field) for sequence in sequences]
            np.testing.assert_allclose(
                gradient[mask], list(itertools.chain(*slopes_by_row)), rtol=1e-6, atol=1e-8, err_msg=f"{what}, {field}"
            )
            assert gradient[~mask].count_nonzero() == 0, what
