"""The simulator: estimates throughput, lag and idle time in virtual time.

The `Coordinator` of real runs makes the decisions. Replicas, trainer, response lengths and faults are models.
`Workload` describes what is simulated, `simulate` simulates it, and `SimulationResult` is the outcome.
"""
