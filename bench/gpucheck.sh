set -x
export PYTHONPATH=src:tests PYTHONUNBUFFERED=1
python3 -c "
import torch, triton; print(torch.__version__, triton.__version__, torch.backends.cudnn.version(), torch.cuda.get_device_name())
import cover
bad=0
import time
t=time.time()
for n in range(40):
    c=cover.at_random(n,(torch.bfloat16,torch.float16,torch.float32))
    try: cover.judged(c,'cuda')
    except Exception as e:
        bad+=1; print('BAD',type(e).__name__,str(e)[-260:],c)
    if time.time()-t>100: print('stopped at',n); break
print('bad',bad,time.time()-t)
" 2>&1 | tail -25
timeout 420 python3 -m bench.tune 2>&1 | tee $OUT/tune.log | tail -150
