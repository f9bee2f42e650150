"""The trainer's connection to its operator.

    records, phase ─► Reporter ─ Standing ─► Courier ─► Link ─► -progress
                         ▲                      │         │
                         └────── Control ◄──────┴─────────┴──── -control

docs/design/contract.md specifies who writes what and when, and what each side does while the other is silent.
"""
