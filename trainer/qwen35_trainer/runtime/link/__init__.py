"""The trainer's connection to its operator: reports of progress in one direction, orders in the other.

    records, phase ─► Reporter ─ Standing ─► Courier ─► Link ─► -progress
                         ▲                      │         │
                         └────── Control ◄──────┴─────────┴──── -control

-progress and -control are the ends of two ConfigMaps' names. docs/design/contract.md specifies who writes what and
when, and what each side does while the other one is silent.
"""
