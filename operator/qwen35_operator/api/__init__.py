"""The custom resource: its versions, its definition and its reference."""
