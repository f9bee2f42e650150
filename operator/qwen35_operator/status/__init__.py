"""The conditions in a training's status, with their reasons, and the format of its times."""
