"""Device code in Triton: kernels that serve every shape, score, mask and GPU."""
