/* MKL asks these two functions whether it runs on a CPU of Intel, and chooses its products by the answer. Loaded before
   PyTorch (LD_PRELOAD), they say yes, so that a machine with another processor computes with the products of Intel's. */
int mkl_serv_intel_cpu_true(void) { return 1; }
int mkl_serv_intel_cpu(void) { return 1; }
