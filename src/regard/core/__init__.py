"""The attention matrix: scores, masks, statistics, the lazy matrix and its autograd. No engine lives here."""
