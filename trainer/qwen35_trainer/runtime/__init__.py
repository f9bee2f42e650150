"""The Ray actors of a training: one driver, N rollout workers, M train workers, and the loop that drives them."""
