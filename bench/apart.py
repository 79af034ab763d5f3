"""Which answers are right when the compiler parts the warps."""

import torch

import regard
from regard.engines.triton import configuration, launch
from regard.engines.triton.configuration import Config as C

for d in (128,):
    for causal in (False, True):
        q, k, v = (torch.randn(2, 4, 2048, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        p = regard.weights(q, k, mask=regard.causal() if causal else None)._factors.problem()
        for names in (("y", "lse"), ("y", "lse", "max_score", "entropy")):
            configuration.forced["forward"] = C(128, 64, 8, 3)
            right = launch.forward(p, names, v, None)
            for c in (C(128, 128, 4, 2, apart=True), C(128, 64, 4, 2, apart=True), C(128, 64, 4, 3, apart=True)):
                configuration.forced["forward"] = c
                try:
                    got = launch.forward(p, names, v, None)
                    off = {
                        n: f"{float((got[n].float() - x.float()).norm() / x.float().norm()):.1e}"
                        for n, x in right.items()
                    }
                    bad = {
                        n: (got[n].float() - x.float()).abs().flatten(3).amax(-1)[0, 0] > 0.05
                        for n, x in right.items()
                        if n != "y"
                    }
                    rows = (
                        {n: [int(m.sum()), m.nonzero().flatten()[:3].tolist()] for n, m in bad.items()} if False else ""
                    )
                    print(d, causal, c.block_j, c.stages, off, rows, flush=True)
                except Exception as e:
                    print(d, causal, c, type(e).__name__, str(e)[:80], flush=True)
