"""The scheduling core: pure state machines that decide what is dispatched, what a batch takes, and when weights are published.

`Coordinator` is the entry point: events and requests in, commands and notices out. Of its parts, `Buffer` and `Window` enforce the staleness rule,
`Placement` tracks where sequences run, `PublicationState` where weights are, and `PromptFeed` which prompt comes next.
`journal` serves recovery after a crash.
"""
