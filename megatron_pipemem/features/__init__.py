"""Features beyond the order of passes. One folder per feature, imported when a request wants it."""
