"""Model families. Each has one adapter that knows its layers; nothing here changes a class of another library."""
