"""How long a test waits for what must come."""

PATIENCE = 400.0
"""Seconds: a hang takes so long, a machine with other work does not. What must come sooner is asserted by its own figure."""
