export PYTHONPATH=src:tests:. PYTHONUNBUFFERED=1
(timeout 100 python3 bench/apart.py > $OUT/apart.log 2>&1 &)
python3 bench/gpucheck.py 0 70 75 2>&1 | cut -c1-420 | tee $OUT/check.log | tail -14
tail -20 $OUT/apart.log | cut -c1-260
timeout 190 python3 -m bench.gpu --quick 2>&1 | cut -c1-170 | tee $OUT/bench.log | grep -v "^|"
