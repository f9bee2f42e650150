"""The vocabulary of the status: conditions with their reasons, and times."""
