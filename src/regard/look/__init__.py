"""Look: the picture of attention, in the terminal, in a page, in a notebook."""
