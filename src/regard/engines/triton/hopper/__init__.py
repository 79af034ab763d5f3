"""Device code in Gluon: warp-specialised and software-pipelined kernels for Hopper GPUs."""
