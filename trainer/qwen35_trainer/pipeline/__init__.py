"""The scheduling core: pure state machines that say what is dispatched, what a batch takes, and when weights are published.

`Coordinator` is the whole of it: events in, actions out. Of its parts, `Buffer` and `Window` hold the rule, `Placement` knows
where sequences run, `Publication` where weights are, `PromptFeed` which prompt comes next. `journal` is for after a crash.
"""
