"""Which keys a row sees: the masks, their algebra, and the intervals that engines loop over."""
