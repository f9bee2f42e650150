"""The simulator: estimates the throughput, lag and idle time of a run in virtual time.

Decisions are those of the `Coordinator` of real runs. Replicas, trainer, response lengths and faults are models.
`Workload` describes what is simulated, `simulate` simulates it, and `SimulationResult` has the measures.
"""
