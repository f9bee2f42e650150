"""The objects of a training as they should be: pure functions, one file per object, golden-tested.

    Training ──► objects_of.always ──► -config, ServiceAccount, Role, RoleBinding, NetworkPolicy
             ──► progress, control ──► what operator and trainer say to each other
             ──► ray_job ◄── pods ◄── profile, volumes, overrides

What is there already, and what should happen, is not known here.
"""
