"""Compares two to eight runs by their recorded metrics, for `qwen35 compare`.

    run.yaml, metrics.jsonl ─► ComparedRun × N ─► Comparison ─► table · JSON · page
                                  │                  ├─ settings that differ
                                  └─► run_events     ├─ learning: reward and held-out measures, by update and by time
                                                     └─ figures: time, speed, staleness, publications, failures

Means and totals are compared as they are. No confidence interval and no statistical significance is computed.
"""
