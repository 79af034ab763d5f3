"""Questions that need complete rows: two matrices, heads together, spans, chosen keys."""
