"""Computes, from a manifest alone, how much memory a training needs and how long an update takes.

    manifest, sizes of the model, device ─► memory of a train rank, of a replica, of a pod ─► what does not fit
                                         └► seconds of an update by part ─► the bottleneck

Nothing is run or loaded. Every module but `resource_plan_command` is pure. Memory is in bytes, time in
seconds. Formulas name their sources.
"""
