"""The commands `qwen35 status` and `qwen35 report`, which show the trainings of a cluster.

    API server ─► lookup · follow ─► TrainingView ─► screen · status_line · training_table
               └► lookup ─► history ─► report

The functions from TrainingView on are pure. This package writes nothing to the cluster, and the operator does not use
it.
"""
