"""Brings the weights from the train pool to the rollout pool (weight synchronisation), with checksums."""
