"""Across ranks: the same matrix when its sequence is split over the processes of `torch.distributed`.

Masks, ALiBi and distances are in global positions, so that every split gives the same results.
"""

from .sharded import ShardedWeights, shard_weights
from .shards import Shards, zigzag
from .transport import RankError

__all__ = ["RankError", "ShardedWeights", "Shards", "shard_weights", "zigzag"]
