"""The scheduling core: pure state machines that decide what is dispatched, what a batch takes, and when weights are published.

`Coordinator` is the entry point: events and requests in, commands and notices out. Of its parts, `Buffer` and `Window`
enforce the staleness rule, `Placement` tracks where sequences run, `PublicationState` tracks which version of the
weights is where, and `PromptFeed` decides which prompt comes next. `journal` is for recovery after a crash.
"""
