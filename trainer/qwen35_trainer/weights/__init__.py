"""Moving weights from the train pool to the rollout pool, verified."""
