"""Facts that estimates need: shapes of published models, devices, and links between them, each with its source."""
