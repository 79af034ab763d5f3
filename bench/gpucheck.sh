export PYTHONPATH=src:tests:. PYTHONUNBUFFERED=1
CUDA_LAUNCH_BLOCKING=1 python3 bench/gpucheck.py 0 45 75 2>&1 | cut -c1-500 | tee $OUT/check.log | tail -45
timeout 260 python3 -m bench.tune 2>&1 | tee $OUT/tune.log | cut -c1-200 | tail -130
