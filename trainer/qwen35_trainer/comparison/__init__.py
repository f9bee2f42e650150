"""Compares runs by their own records, for `qwen35 compare`.

run.yaml, metrics.jsonl ─► ComparedRun × N ─► Comparison ─► table · JSON · page
                              │                  ├─ settings that differ
                              └─► run_events     ├─ learning: reward and held-out measures, by update and by time
                                                 └─ figures: time, speed, staleness, publications, failures
"""
