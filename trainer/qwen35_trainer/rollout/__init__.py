"""Engines that generate sequences: one contract (`base`), one file per engine."""
