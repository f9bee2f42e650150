"""`qwen35 status` and `qwen35 report`: trainings of a cluster in a terminal.

    API server ─► lookup · follow ─► TrainingView ─► screen · status_line · training_table     pure from TrainingView on
               └► lookup ─► history ─► report

This package writes nothing to the cluster, and the operator does not use it.
"""
