"""Models of other libraries with attention computed by regard."""
