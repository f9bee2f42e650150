"""What people see of trainings from a terminal: `qwen35 status` and `qwen35 report`.

    API server ─► lookup · follow ─► Seen ─► screen · line · table      pure from Seen on
               └► lookup ─► history ─► report

Nothing here writes to the cluster, and nothing of it runs in the operator.
"""
