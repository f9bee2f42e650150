"""What the operator reports: the vocabulary of conditions and reasons, and the status made from what is seen."""
