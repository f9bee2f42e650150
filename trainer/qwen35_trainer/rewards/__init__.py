"""Verifiable rewards, built from the spec. A scorer that hangs or crashes does not stop the training.

This package does not import torch, and this file imports nothing, because the worker process of each reward imports
it first.
"""
