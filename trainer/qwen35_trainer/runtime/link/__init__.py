"""The trainer's end of the line to its operator.

    records, phase ─► Reporter ─ Standing ─► Courier ─► Link ─► -progress
                         ▲                      │         │
                         └────── Control ◄──────┴─────────┴──── -control

`docs/design/contract.md` says who writes what, when, and what silence means.
"""
