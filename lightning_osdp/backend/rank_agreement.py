"""Ranks agree over the store on what they do next, without a collective: each may want something else, or be blocked.

A rank that asks writes what it wants under the number of the step. The last one to come decides for all. A rank that
does not ask is looked at by its responder, a thread with a connection of its own: it answers how far that rank is and
in which collective operation its main thread is blocked, and has it ask from its next step on.
"""

from __future__ import annotations

import atexit
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from lightning_osdp.backend.blocked_thread import BlockedWatch, Wait
from lightning_osdp.errors import ShardingError

RESPONSE_INTERVAL_S = 0.2
"""Seconds between two looks of a responder at whether another rank asks."""

INQUIRY_AFTER_S, INQUIRY_INTERVAL_S = 0.05, 1.0
"""Seconds after which a rank that asks wants to know where the others are, and between two such inquiries."""

LOOK_INTERVAL_S, LOOK_INTERVAL_S_PER_RANK = 0.02, 0.002
"""Seconds between two looks at the answers: the store serves the looks of all ranks, each of which is as long as there
are ranks."""

BLOCKED_S = 6.0
"""Seconds for which a rank has to be blocked in the same place until it counts as blocked for good."""

MAX_UNANSWERED = 2
"""Number of inquiries that the answer of a rank may be old until it says nothing of where the rank is."""

NO_ANSWER_S = 60.0
"""Seconds without an answer after which a rank counts as ended. Native code that holds Python's lock gives none."""

MAX_POLL_S = 0.02
"""Longest pause between two looks at whether the ranks have decided."""


ADVICE = (
    "Operators whose weights are sharded must run on all ranks: run the model on every rank equally often, also to log "
    "a sample or to generate, call state_dict() or strategy.summon_full_params() on all of them, too, and let one rank "
    "use the result"
)
"""What to do where ranks differ."""


@dataclass(frozen=True)
class Request:
    """What a rank wants to do next.

    Attributes:
        event: what it is, the same text on all ranks that want the same.
        program_place: where in its program the rank is.
        description: ``event`` and ``program_place`` in words.
        failure: why this rank can't go on, if it can't.
        advice: what to do if the others want something else.
    """

    event: str
    program_place: str
    description: str
    failure: str = ""
    advice: str = ADVICE


@dataclass(frozen=True)
class Decision:
    """What all ranks do next.

    Attributes:
        event: one of the requested events.
        is_unanimous: whether all ranks requested it.
        error_message: why the ranks can't go on, raised on all; empty if they can.
        inquiries: number of inquiries that are answered by it.
    """

    event: str
    is_unanimous: bool = True
    error_message: str = ""
    inquiries: int = 0


Decide = Callable[[Sequence[Request]], Decision]


class RankAgreement:
    """One sequence of steps on which the ranks of a group agree. All ranks create theirs in the same order.

    Args:
        group: the ranks.
        decide: makes the decision from all ranks' requests; the same function on all ranks.
        describe: returns an event in words.
    """

    def __init__(self, group: Any, decide: Decide, describe: Callable[[str], str]) -> None:
        self._rank, self._size, self._decide, self._describe = group.rank(), group.size(), decide, describe
        numbers = _numbers_by_group.setdefault(group, itertools.count())
        self._prefix = f"lightning_osdp/agreement/{group.group_name}/{next(numbers)}"
        connection: Any = _get_default_store()
        self._store: Any = PrefixStore(self._prefix, connection)
        self._timeout_s = group._get_backend(group._device_types[0]).options._timeout.total_seconds()
        self._lock = threading.Lock()
        self._position = 0
        self._must_ask = False
        self._last_event = ""
        self._num_answered = 0
        self._last_decision = -1
        self._store.set(f"request/{self._rank}", json.dumps({"position": -1}))
        self._store.set(f"status/{self._rank}", "{}")
        _responder.add(self)

    def advance(self, event: str) -> bool:
        """Go on with ``event`` without asking; returns whether this is allowed."""
        with self._lock:
            if self._must_ask:
                return False
            self._position += 1
            self._last_event = event
            return True

    def ask(self, request: Request) -> Decision | None:
        """Return what all ranks do in this step, or None if some have made it without asking.

        Raises:
            ShardingError: ranks can't agree, are blocked, or have ended.
        """
        position = self._position
        self._store.set(f"request/{self._rank}", json.dumps({"position": position, **asdict(request)}))
        if self._store.add(f"arrived/{position}", 1) == self._size:
            self._publish_decision(position)
        elif not self._wait_or_withdraw(position, request):
            self._store.delete_key(f"arrived/{position}")
            with self._lock:  # those that went on ask at their next step: this rank, too, until all have met
                self._position += 1
                self._must_ask = True
            return None
        decision = Decision(**json.loads(self._store.get(f"decision/{position}")))
        with self._lock:
            self._position += 1
            self._last_event, self._last_decision, self._must_ask = decision.event, position, False
            self._num_answered = max(self._num_answered, decision.inquiries)
        if decision.error_message:
            raise ShardingError(decision.error_message)
        return decision

    def answer_inquiry(self, connection: Any, wait: Wait) -> None:
        """Tell ranks that wait for this one how far it is. Called by the responder.

        Args:
            connection: a connection to the store for the responder alone.
            wait: what the main thread waits for.
        """
        store: Any = PrefixStore(self._prefix, connection)
        inquiries = store.add("inquiries", 0)
        if inquiries <= self._num_answered:
            return
        with self._lock:
            self._must_ask = True
            status = {"position": self._position, "inquiries": inquiries}
        status |= {"did": self.describe_last(), "blocked_in": wait.operation, "blocked_s": wait.seconds}
        store.set(f"status/{self._rank}", json.dumps(status))
        self._num_answered = max(inquiries, self._num_answered)

    def describe_last(self) -> str:
        """Return what this rank has done last, in words."""
        return self._describe(self._last_event)

    @property
    def position(self) -> int:
        """Return the number of steps that this rank has made."""
        return self._position

    def report_end(self, connection: Any) -> None:
        """Tell the other ranks that this one has ended. Called by the responder."""
        PrefixStore(self._prefix, connection).set(f"status/{self._rank}", json.dumps({"ended": True}))

    def close(self) -> None:
        """Answer no more inquiries."""
        _responder.remove(self)

    def _publish_decision(self, position: int) -> None:
        requests = []
        for text in self._store.multi_get([f"request/{rank}" for rank in range(self._size)]):
            request = json.loads(text)
            assert request.pop("position") == position
            requests.append(Request(**request))
        decision = asdict(self._decide(requests)) | {"inquiries": self._store.add("inquiries", 0)}
        self._store.set(f"decision/{position}", json.dumps(decision))
        for done in (f"arrived/{position}", f"decision/{self._last_decision}"):
            self._store.delete_key(done)

    def _wait_or_withdraw(self, position: int, request: Request) -> bool:
        """Return as ``_wait_for_decision``. A rank that can't go on asks no more: its user may handle the error."""
        try:
            return self._wait_for_decision(position, request)
        except ShardingError:
            with suppress(RuntimeError):  # the store has ended with rank 0
                is_last = self._store.add(f"arrived/{position}", -1) == self._size - 1
                if is_last or self._store.check([f"decision/{position}"]):  # all have come in the meantime
                    return True
            raise

    def _wait_for_decision(self, position: int, request: Request) -> bool:
        """Return True once the decision is there, and False if another rank has passed this step without asking."""
        started, pause_s, waiting = time.monotonic(), 1e-4, None
        while not self._store.check([f"decision/{position}"]):
            if waiting is not None and waiting.has_passed(position):
                return bool(self._store.check([f"decision/{position}"]))  # it may have been made in the meantime
            waited_s = time.monotonic() - started
            if waiting is None and waited_s > INQUIRY_AFTER_S:
                waiting = _Inquiry(self._store, self._rank, self._size)
            elif waiting is not None:
                waiting.look(position, request, self._timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_POLL_S)
        return True


_numbers_by_group: WeakKeyDictionary[Any, itertools.count[int]] = WeakKeyDictionary()
"""Numbers the agreements of each group."""


class _Inquiry:
    """What a rank that waits for a decision learns of the others."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        self._keys = [f"{kind}/{other}" for kind in ("status", "request") for other in range(size)]
        self._others = [other for other in range(size) if other != rank]
        self._look_interval_s = LOOK_INTERVAL_S + LOOK_INTERVAL_S_PER_RANK * size
        self._started_s = self._inquired_s = self._looked_s = time.monotonic()
        self._first = self._last = self._store.add("inquiries", 1)
        self._statuses: list[dict[str, Any]] = [{} for _ in range(size)]
        self._requests: list[dict[str, Any]] = [{} for _ in range(size)]

    def has_passed(self, position: int) -> bool:
        """Return whether any other rank has gone on from ``position``."""
        return any(status.get("position", -1) > position for status in self._statuses)

    def look(self, position: int, request: Request, timeout_s: float) -> None:
        """Read the answers, unless that was done just now.

        Raises:
            ShardingError: no decision can come any more.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < self._look_interval_s:
            return
        self._looked_s = now_s
        if now_s - self._inquired_s > INQUIRY_INTERVAL_S:
            self._inquired_s = now_s
            self._last = self._store.add("inquiries", 1)
        if self._store.check(self._keys):  # otherwise a rank has no engine yet
            values = [json.loads(text) for text in self._store.multi_get(self._keys)]
            self._statuses, self._requests = values[: len(values) // 2], values[len(values) // 2 :]
        wanted = f"rank {self._rank} {request.description}"
        waited_s = now_s - self._started_s
        silent = [rank for rank in self._others if self._statuses[rank].get("inquiries", 0) < self._first]
        ended = [rank for rank in self._others if self._statuses[rank].get("ended")]
        if ended or (silent and waited_s > NO_ANSWER_S):
            rank = (ended or silent)[0]
            raise ShardingError(f"lost the connection to rank {rank}, which has ended or hangs, while {wanted}")
        if waited_s > timeout_s:
            raise ShardingError(
                f"timed out: {wanted}, and other ranks did not come within {timeout_s:g} s. Where a rank needs longer "
                "by itself, set OSDPStrategy(timeout=...)"
            )
        if waited_s >= BLOCKED_S:
            self._raise_if_blocked(position, wanted, request.advice)

    def _raise_if_blocked(self, position: int, wanted: str, advice: str) -> None:
        """Raise an error if all other ranks ask as well, or are blocked in an operation that needs this rank."""
        blocked = []
        for rank in self._others:
            status = self._statuses[rank]
            is_answering = status.get("inquiries", 0) >= max(self._first, self._last - MAX_UNANSWERED)
            if is_answering and status["blocked_s"] >= BLOCKED_S:
                blocked.append(f"rank {rank} waits in {status['blocked_in']}, after it {status['did']}")
            elif self._requests[rank].get("position") != position:
                return
        if blocked:
            raise ShardingError(f"ranks wait for each other: {wanted}, while {'; '.join(blocked)}. {advice}")


class _Responder:
    """The thread that answers inquiries of other ranks, for all agreements of this process."""

    def __init__(self) -> None:
        self._agreements: WeakSet[RankAgreement] = WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._stopped = threading.Event()
        self.wait = Wait()
        """What the main thread waits for."""

    def add(self, agreement: RankAgreement) -> None:
        """Answer inquiries for ``agreement``."""
        with self._lock:
            self._agreements.add(agreement)
            store: Any = _get_default_store()
            if self._thread is None or not self._thread.is_alive() or self._store is not store:
                self._stopped.set()
                self._stopped, self._store = threading.Event(), store
                arguments = (store.clone(), self._stopped)
                self._thread = threading.Thread(target=self._run, args=arguments, daemon=True, name="osdp-agreement")
                self._thread.start()
                atexit.unregister(self.stop)
                atexit.register(self.stop)

    def remove(self, agreement: RankAgreement) -> None:
        """Answer no more inquiries for ``agreement``."""
        with self._lock:
            self._agreements.discard(agreement)

    def stop(self) -> None:
        """Tell the other ranks that this one ends, and end the thread: it may crash an interpreter that ends."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def list_agreements(self) -> list[RankAgreement]:
        """Return those for which inquiries are answered."""
        with self._lock:
            return list(self._agreements)

    def _run(self, connection: Any, stopped: threading.Event) -> None:
        watch = BlockedWatch()
        with suppress(RuntimeError):  # the store has ended with rank 0
            while not stopped.wait(RESPONSE_INTERVAL_S):
                self._answer_inquiries(connection, watch)
            for agreement in self.list_agreements():
                agreement.report_end(connection)

    def _answer_inquiries(self, connection: Any, watch: BlockedWatch) -> None:
        agreements = self.list_agreements()  # a variable of the thread's loop would hold the last engine
        self.wait = watch.look(sum(agreement.position for agreement in agreements))
        for agreement in agreements:
            agreement.answer_inquiry(connection, self.wait)


_responder = _Responder()


def present_wait() -> tuple[Wait, str]:
    """Return what the main thread waits for, and what the ranks have agreed on last, in words."""
    agreements = sorted(_responder.list_agreements(), key=lambda agreement: agreement.position)
    return _responder.wait, agreements[-1].describe_last() if agreements else "did nothing"
