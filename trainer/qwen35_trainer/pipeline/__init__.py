"""The scheduling core: pure state machines that say what may be dispatched and what a batch takes."""
