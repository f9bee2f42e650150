from typing import get_args

import pytest

from qwen35_trainer.algorithms.advantages import ADVANTAGES
from qwen35_trainer.algorithms.aggregation import AGGREGATIONS
from qwen35_trainer.algorithms.corrections import CORRECTIONS
from qwen35_trainer.algorithms.kl import ESTIMATORS
from qwen35_trainer.algorithms.losses import LOSSES
from qwen35_trainer.algorithms.registry import Registry
from qwen35_trainer.manifest.algorithm import AdvantageType, AggregationName, CorrectionType, KLEstimator, LossType


def test_an_entry_is_found_by_its_name():
    registry = Registry("shape")
    assert registry.register("Round")(abs) is abs
    assert registry.get("Round") is abs


def test_an_unknown_name_is_refused_with_the_known_ones():
    registry = Registry("shape")
    registry.register("Round")(abs)
    registry.register("Square")(pow)
    with pytest.raises(ValueError, match=r"unknown shape 'round'. Use one of Round, Square\."):
        registry.get("round")


def test_a_name_is_given_once():
    registry = Registry("shape")
    registry.register("Round")(abs)
    with pytest.raises(ValueError, match="shape 'Round' is registered twice"):
        registry.register("Round")(pow)


def test_the_names_are_those_of_the_manifest():
    assert set(ADVANTAGES.names) == set(get_args(AdvantageType)) - {"Function"}
    assert set(LOSSES.names) == set(get_args(LossType)) - {"Function"}
    assert set(ESTIMATORS.names) == set(get_args(KLEstimator))
    assert set(AGGREGATIONS.names) == set(get_args(AggregationName))
    assert set(CORRECTIONS.names) == set(get_args(CorrectionType))
