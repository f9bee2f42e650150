"""The desired child objects of a training: pure functions, one file per kind of object, with golden tests.

    TrainingResource ──► all_objects ──► -config, -progress, -history, -control, ServiceAccount, Role, RoleBinding, NetworkPolicy
                     ──► disruption_budget
                     ──► ray_job ◄── pod_templates ◄── device profile, pod_size, volumes, ray_tls, pod_overrides

These functions do not read the objects that exist, and do not decide what happens next.
"""
