"""Verifiable rewards, built from the spec. A reward function that hangs or crashes does not stop the training.

This package does not import torch, and this file imports nothing: the worker process of each reward imports it first.
"""
