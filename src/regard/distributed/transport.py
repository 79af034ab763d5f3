"""Messages between ranks, and one error for all of them where a rank fails.

Everything travels point to point: a rank that waits knows for whom. A wait ends after the timeout. The rank that fails
writes its cause into the process group's store; the others read it there when their wait ends, so that all of them
raise the same `RankError`.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

__all__ = ["Message", "Pending", "RankError", "Ranks", "ends_recomputation"]

log = logging.getLogger("regard")

#: The key of the store with what the first rank raised: of several that raise at once, all name this one.
FIRST = "regard/failure/first"

#: The part of a timeout that is left for reading the other ranks' causes, and the longest that is useful, in seconds.
REPORT_SHARE, LONGEST_REPORT = 0.25, 5.0


class RankError(RuntimeError):
    """A rank failed or disagrees with the others: the same error on every rank.

    Attributes:
        ranks: The ranks that are the cause, numbered within the mesh.

    >>> raise regard.distributed.RankError("rank 1 of 4 sent nothing for 60 s.", (1,))
    Traceback (most recent call last):
    ...
    regard.distributed.RankError: rank 1 of 4 sent nothing for 60 s.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class _LostPeerError(Exception):
    """A wait for another rank that ended without its message."""

    def __init__(self, peer: int, closed: bool) -> None:
        super().__init__(f"rank {peer}")
        self.peer, self.closed = peer, closed


#: One tensor to or from a rank of the group.
Message = tuple[int, Tensor]


@dataclass
class Pending:
    """Messages under way. Their tensors stay referenced until `Ranks.wait`, and no longer."""

    works: list[tuple[int, Any]]
    sends: list[Message]
    receives: list[Message]
    #: Buffers in host memory for tensors that the backend cannot reach.
    staged: list[Tensor]


@dataclass
class _GroupHealth:
    """The first failure of a process group: after a failed exchange nothing in it can be matched any more."""

    error: RankError | None = None
    matrices: int = 0
    nodes: int = 0
    #: The call that is under way, as a text that is the same on all ranks; and whether there is one.
    call: str | None = None
    inside: bool = False


#: A group that is destroyed is not kept until the process exits: its threads would end while Python does, and abort.
_HEALTH: WeakKeyDictionary[Any, _GroupHealth] = WeakKeyDictionary()


class Ranks:
    """The ranks of one process group.

    Args:
        group: A process group of `torch.distributed`.
        timeout: Seconds that a rank waits for another one.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self.group, self.timeout = group, timeout
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # Of each kind of device: its name alone is "undefined" where the group was made without one, as meshes are.
        self._backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        self.bytes_sent = self.bytes_received = 0
        self._report_time = min(LONGEST_REPORT, REPORT_SHARE * timeout)
        self._health = _HEALTH.setdefault(group, _GroupHealth())

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # processes are not copied: a copy of a matrix uses the same ones

    def __reduce__(self) -> Any:
        raise TypeError(
            "a matrix over ranks cannot be pickled: its ranks are running processes. Save q and k of every rank, and "
            "call regard.weights(..., mesh=...) on them again."
        )

    @property
    def others(self) -> list[int]:
        """The other ranks, each rank starting behind itself: not all of them talk to rank 0 first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def next_matrix(self) -> int:
        """How many matrices were made in this process group, the one that is being made included."""
        self._health.matrices += 1
        return self._health.matrices

    def next_node(self) -> int:
        """How many autograd nodes were made in this process group, the one that is being made included."""
        self._health.nodes += 1
        return self._health.nodes

    @property
    def call(self) -> str | None:
        """The call that is under way; None where there is none with arguments."""
        return self._health.call

    @contextmanager
    def calling(self, call: str | None) -> Iterator[bool]:
        """Around a call of this rank; whether it is inside no other one. The outermost one with a text is `call`."""
        health = self._health
        inside, before = health.inside, health.call
        health.inside, health.call = True, call if before is None else before
        try:
            yield not inside
        finally:
            health.inside, health.call = inside, before

    # Messages.

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Begin to send and to receive; empty tensors are not sent."""
        sends = [(peer, t.contiguous()) for peer, t in sends if t.numel()]
        receives = [(peer, t) for peer, t in receives if t.numel()]
        if not sends and not receives:
            return Pending([], [], [], [])
        staged_out = [(peer, self._reachable(t)) for peer, t in sends]
        staged_in = [(peer, t if self._reaches(t) else t.new_empty(t.shape, device="cpu")) for peer, t in receives]
        ops = [dist.P2POp(dist.isend, t, group=self.group, group_peer=peer) for peer, t in staged_out]
        ops += [dist.P2POp(dist.irecv, t, group=self.group, group_peer=peer) for peer, t in staged_in]
        peers = [peer for peer, _ in (*staged_out, *staged_in)]
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            if "Duplicate GPU" in str(error):
                raise ValueError(
                    "NCCL needs a GPU for each rank, and two ranks use the same one; call torch.cuda.set_device with "
                    'the local rank, or init_process_group("gloo") where ranks share a GPU.'
                ) from error
            raise _LostPeerError(peers[0], closed=True) from error
        self.bytes_sent += sum(t.numel() * t.element_size() for _, t in staged_out)
        self.bytes_received += sum(t.numel() * t.element_size() for _, t in staged_in)
        # Backends that send a batch as one return one work for all of it.
        named = list(zip(peers, works, strict=True)) if len(works) == len(peers) else [(peers[0], w) for w in works]
        return Pending(named, staged_out, list(receives), [t for _, t in staged_in])

    def wait(self, pending: Pending) -> None:
        """Until the messages have arrived and left."""
        deadline = timedelta(seconds=self.timeout - self._report_time)
        for peer, work in pending.works:
            try:
                work.wait(deadline)
            except RuntimeError as error:
                closed = "timed out" not in str(error).lower() and "timeout" not in str(error).lower()
                raise _LostPeerError(peer, closed) from error
        for (_, t), arrived in zip(pending.receives, pending.staged, strict=True):
            if arrived is not t:
                t.copy_(arrived)
        pending.works, pending.sends, pending.receives, pending.staged = [], [], [], []

    def check_reaches(self, t: Tensor) -> None:
        """Raise ValueError where no backend of the group sends such a tensor, not from host memory either."""
        if not self._reaches(t) and "cpu" not in self._backends:
            raise ValueError(
                f"tensors must be on {' or '.join(self._backends)}, which the process group reaches; got one on "
                f'{t.device}. Move them there, or use init_process_group("cpu:gloo,cuda:nccl").'
            )

    def _reaches(self, t: Tensor) -> bool:
        kind = t.device.type
        return kind in self._backends and (kind == "cpu" or self._backends[kind] != "gloo")

    def _reachable(self, t: Tensor) -> Tensor:
        """The tensor where a backend reaches it: gloo sends from host memory."""
        return t if self._reaches(t) else t.cpu()

    def gather_text(self, text: str) -> list[str]:
        """One text of every rank, in the order of the ranks."""
        device = "cpu" if "cpu" in self._backends else torch.device("cuda", torch.cuda.current_device())
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
        sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(self.size)]
        own_size = torch.tensor([own.numel()], device=device)
        self.wait(self.post([(p, own_size) for p in self.others], [(p, sizes[p]) for p in self.others]))
        texts = [own if p == self.rank else own.new_empty(int(sizes[p])) for p in range(self.size)]
        self.wait(self.post([(p, own) for p in self.others], [(p, texts[p]) for p in self.others]))
        return [bytes(t.tolist()).decode() for t in texts]

    def gather(self, own: Tensor) -> list[Tensor]:
        """A tensor of every rank, all of one shape, in the order of the ranks."""
        parts = [own if p == self.rank else torch.empty_like(own, memory_format=torch.contiguous_format)
                 for p in range(self.size)]  # fmt: skip
        self.wait(self.post([(p, own) for p in self.others], [(p, parts[p]) for p in self.others]))
        return parts

    def sum(self, own: Tensor) -> Tensor:
        """The sum over all ranks, in the order of the ranks: bit-equal on all of them."""
        parts = self.gather(own)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    # Failures.

    @contextmanager
    def together(self, what: str, cause: Exception | None = None) -> Iterator[None]:
        """Around everything that ranks do together: whatever fails in it fails on every rank, with one error.

        Args:
            what: Its name in errors.
            cause: What this rank is about to tell the others: its own error, where they are not there to hear it.
        """
        if self._health.error is not None:
            raise RankError(
                f"an exchange in this process group failed before, and its ranks are out of step: {self._health.error} "
                "Start the ranks again.",
                self._health.error.ranks,
            )
        if self.size > 1 and self._is_destroyed():
            raise RankError(
                "the process group of this matrix was destroyed; call init_process_group, and weights() again on every "
                "rank."
            )
        try:
            yield
        except RankError:  # every rank has come to it by itself
            raise
        except BaseException as error:
            if ends_recomputation(error):
                raise
            diagnosis = self._diagnose(error if cause is None else cause, what)
            self._health.error = diagnosis
            if isinstance(error, Exception):
                raise diagnosis from (error if cause is None else cause)
            raise  # an interrupt stays one

    def _is_destroyed(self) -> bool:
        try:
            dist.get_backend(self.group)
        except ValueError:
            return True
        return False

    def store(self) -> Any:
        """The key-value store of the process group; None in a PyTorch without the private function that returns it."""
        return None if (store_of := _store_getter()) is None else store_of(self.group)

    def check_store(self) -> str | None:
        """None if the store answers, else the cause."""
        answer: list[str | None] = [f"its store does not answer within {self._report_time:g} s"]

        def probe() -> None:
            try:
                if (store := self.store()) is not None:
                    store.add(f"regard/alive/{self.rank}", 1)  # waits for an answer, as `set` does not
                answer[0] = None
            except Exception as error:
                answer[0] = f"its store is closed ({type(error).__name__}: {_first_line(error)})"

        _run_for(self._report_time, probe)
        return answer[0]

    def _diagnose(self, error: BaseException, what: str) -> RankError:
        """Which rank failed, and why: from this rank's error and those of the others in the store."""
        if isinstance(error, _LostPeerError):
            own: dict[str, Any] = {"rank": self.rank, "lost": error.peer, "closed": error.closed}
        else:
            own = {"rank": self.rank, "raised": f"{type(error).__name__}: {_first_line(error)}", "in": what}
        reports: dict[int | str, dict[str, Any]] = {self.rank: own}
        _run_for(self._report_time + 0.5, lambda: self._collect(reports))
        return self._conclude(dict(reports), what)

    def _collect(self, reports: dict[int | str, dict[str, Any]]) -> None:
        try:
            if (store := self.store()) is None:
                return
            own = json.dumps(reports[self.rank])
            if "raised" in reports[self.rank]:
                store.compare_set(FIRST, "", own)
            store.set(f"regard/failure/{self.rank}", own)
            deadline = time.monotonic() + self._report_time
            while time.monotonic() < deadline and len(reports) < self.size:
                for rank in self.others:
                    if rank not in reports and store.check([f"regard/failure/{rank}"]):
                        reports[rank] = json.loads(store.get(f"regard/failure/{rank}"))
                if store.check([FIRST]):
                    reports[FIRST] = json.loads(store.get(FIRST))
                    return
                time.sleep(0.02)
        except Exception:  # a closed store: this rank's own knowledge has to do
            return

    def _conclude(self, reports: dict[int | str, dict[str, Any]], what: str) -> RankError:
        first = [reports.pop(FIRST)] if FIRST in reports else []
        if raised := [report for report in (*first, *reports.values()) if "raised" in report]:
            rank, call, text = raised[0]["rank"], raised[0]["in"], raised[0]["raised"]
            return RankError(f"rank {rank} of {self.size} failed in {call}: {text}", (rank,))
        lost = {report["lost"] for report in reports.values()}
        silent = sorted(set(range(self.size)) - set(reports)) or sorted(lost)
        late = {report["lost"] for report in reports.values() if not report["closed"]}
        if len(reports) == self.size and late:  # all of them live: a rank that gave up waiting closed its connections
            return self._late(sorted(late), what)
        # No report of others arrives from a closed store: then the rank that this one waited for is named.
        if len(reports) == 1 and self.size > 2 and reports[self.rank]["lost"] in silent:
            silent = [reports[self.rank]["lost"]]
        if not any(report["closed"] and report["lost"] in silent for report in reports.values()):
            return self._late(silent, what)
        return RankError(
            f"{_names(silent)} of {self.size} closed the connection: a process died or left early (in {what}).",
            tuple(silent),
        )

    def _late(self, ranks: list[int], what: str) -> RankError:
        return RankError(
            f"{_names(ranks)} of {self.size} sent nothing for {self.timeout:g} s: a process hangs, is stopped, or "
            f"computes longer than the timeout (in {what}). A longer wait: Shards(mesh, timeout=seconds).",
            tuple(ranks),
        )


def ends_recomputation(error: BaseException) -> bool:
    """Whether an activation checkpoint ends its second forward pass, once it has all tensors: that is no failure."""
    return isinstance(error, getattr(torch.utils.checkpoint, "_StopRecomputationError", ()))


@functools.cache
def _store_getter() -> Callable[[Any], Any] | None:
    store_of = getattr(dist.distributed_c10d, "_get_process_group_store", None)
    if store_of is None:
        log.warning("this PyTorch has no _get_process_group_store: a RankError says what its own rank saw alone")
    return store_of


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _run_for(seconds: float, job: Callable[[], None]) -> None:
    """Run a job for some seconds at most: a store whose host is stopped blocks its callers."""
    thread = threading.Thread(target=job, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # too little memory for another thread
        job()
        return
    thread.join(seconds)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
