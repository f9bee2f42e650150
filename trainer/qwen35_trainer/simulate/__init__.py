"""What a choice of pools, knobs and rule gives, found in virtual time: the run's own `Coordinator`, and a model of the rest.

`Load` is everything that is simulated, `simulate` plays it, `Result` is what came of it.
"""
