"""How a query scores a key: similarities, what modifies them, and what engines make of both."""
