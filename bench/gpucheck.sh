export PYTHONPATH=src:tests:. PYTHONUNBUFFERED=1
cat > /tmp/one.py <<'P'
import cover, torch, sys
c=cover.at_random(int(sys.argv[1]),(torch.bfloat16,torch.float16,torch.float32))
try: cover.judged(c,'cuda',gradients=False); print('ok',c)
except Exception as e: print(type(e).__name__,str(e)[:200])
P
(timeout 120 compute-sanitizer --tool memcheck --print-limit 3 python3 /tmp/one.py 11 > $OUT/san11.log 2>&1 &)
(timeout 120 compute-sanitizer --tool memcheck --print-limit 3 python3 /tmp/one.py 5 > $OUT/san5.log 2>&1 &)
timeout 240 python3 -m bench.tune 2>&1 | tee $OUT/tune.log | cut -c1-200 | tail -150
head -c 1500 $OUT/san11.log; head -c 1500 $OUT/san5.log
