export PYTHONPATH=src:tests:. PYTHONUNBUFFERED=1
python3 -c "import torch, triton; print(torch.__version__, triton.__version__, torch.backends.cudnn.version(), torch.cuda.get_device_name())"
python3 bench/gpucheck.py 0 90 110 2>&1 | cut -c1-600 | tee $OUT/check.log | tail -20
timeout 380 python3 -m bench.tune 2>&1 | tee $OUT/tune.log | cut -c1-200 | tail -130
