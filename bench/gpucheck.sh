export PYTHONPATH=src:tests:. PYTHONUNBUFFERED=1
python3 -m pytest --version 2>&1 | head -1; python3 -c "import xdist" 2>&1 | tail -1
(REGARD_CONFIGURATIONS=0 timeout 130 python3 -m pytest tests/gpu -c /dev/null --confcutdir tests/gpu -p no:cacheprovider -q -x --maxfail 20 --tb=short > $OUT/pytest.log 2>&1; tail -60 $OUT/pytest.log | cut -c1-220 > $OUT/pytail.log) &
python3 bench/gpucheck.py 100 190 75 2>&1 | cut -c1-420 | tee $OUT/check.log | tail -8
wait
cat $OUT/pytail.log
timeout 100 python3 -m bench.tune top forward 2>&1 | cut -c1-120 | tee $OUT/tune.log
