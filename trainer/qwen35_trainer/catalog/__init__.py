"""Facts that estimates need: sizes of published models, devices, and links between devices, each with its source."""
