"""The custom resource Qwen35Training: its versions, its CustomResourceDefinition and the reference of its fields."""
