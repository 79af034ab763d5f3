"""Speed and memory, measured as ratios to a peer in the same run."""
