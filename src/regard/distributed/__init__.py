"""Across ranks: the same matrix when its sequence is split over the processes of `torch.distributed`.

Masks, ALiBi and distances are in global positions, so that every split gives the same results.
"""

from .. import _lazy
from .build import shard_weights as shard_weights
from .cost import MACHINES as MACHINES
from .cost import Cost, Machine, Mesh, Trace, ring_trace
from .cost import cost as cost
from .dtensors import DTensorWeights
from .dtensors import dtensor_weights as dtensor_weights
from .sharded import ShardedWeights
from .shards import Shards, zigzag
from .transport import RankError

__all__ = [
    "Cost",
    "DTensorWeights",
    "Machine",
    "Mesh",
    "RankError",
    "ShardedWeights",
    "Shards",
    "Trace",
    "ring_trace",
    "zigzag",
]

_lazy.publish(__name__)
