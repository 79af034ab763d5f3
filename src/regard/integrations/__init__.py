"""Other libraries' models on regard's own attention."""
