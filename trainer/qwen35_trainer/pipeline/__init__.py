"""The scheduling core: pure state machines that dispatch prompts, compose batches, and decide when to publish weights.

`Coordinator` is the entry point: events and requests in, commands and notices out. Its parts: `Buffer` and `Window`
limit the number and the age of groups, `Placement` assigns sequences to replicas, `PublicationState` tracks versions of
the weights on their way to the replicas, and `PromptFeed` decides which prompt comes next. `journal` is for recovery
after a crash.
"""
