"""Model families, each with one adapter for its layers. No class of another library is changed."""
