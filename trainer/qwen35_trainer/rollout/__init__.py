"""Engines that generate sequences: one contract (`rollout_engine`), one file per engine."""
