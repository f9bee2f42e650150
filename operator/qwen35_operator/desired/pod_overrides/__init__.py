"""The user's changes to the pod templates (spec.pods): checks, and their merge into the operator's templates.

spec.pods ──► shape ──► reserved_fields ──► merge ──► consistency · label_syntax
"""
