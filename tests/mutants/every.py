"""The list: ten mistakes for each of four packages."""

from tests.mutants.engines import ENGINES
from tests.mutants.mutant import Mutant
from tests.mutants.pipeline import PIPELINE
from tests.mutants.reconcile import RECONCILE
from tests.mutants.weights import WEIGHTS

MUTANTS: tuple[Mutant, ...] = (*PIPELINE, *RECONCILE, *WEIGHTS, *ENGINES)
