"""The same page on loopback: tiles of long matrices are computed on demand, and a typed sentence is looked at."""
