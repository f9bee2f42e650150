"""Verifiable rewards: built from the spec, run so that no scorer can stop a training by hanging or crashing.

Nothing here imports torch, and this file imports nothing: the worker process of each reward begins with it.
"""
