"""The simulator: estimates throughput, lag and idle time in virtual time.

The run's own `Coordinator` decides; replicas, trainer, lengths and faults are models. `Workload` describes what is simulated,
`simulate` plays it, and `SimulationResult` is the outcome.
"""
