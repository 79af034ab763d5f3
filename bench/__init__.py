"""Speed and memory, measured as ratios to a peer in the same run. `python -m bench.cpu` writes bench/results/cpu.json."""
