"""The engine's own thread: commands in, events out, and what is to be said of its health.

    event loop                         engine thread
    submit(job) --> commands ------->  engine.add
    leave(job)  -->                    engine.cancel, or read on where the job asked for that
    call(f)     -->                    f(engine)
    job.events  <-- one call a step -- engine.step

An engine is not thread-safe, so no other thread touches it. What others may know of it is in `Snapshot`,
which is replaced whole after each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from packhorse.core.errors import CardLostError, PackhorseError
from packhorse.core.types import Event, FinishReason, Request, Usage

if TYPE_CHECKING:
    from packhorse.engine.engine import Engine
    from packhorse.engine.session import Session
    from packhorse.store.kv import StoreStats

T = TypeVar("T")

DEGRADED_S = 600.0
"""How long health remembers a failed step."""
STALLED_S = 120.0
"""A step that takes longer than this makes health say so."""
CARD_S = 10.0
"""Between two questions to a card's driver."""


class StepError(PackhorseError):
    """The step that computed a request failed."""

    kind = "step_failed"


class StoppedError(PackhorseError):
    """The engine has ended, or is ending: no answer will come."""

    kind = "stopped"


class Status(StrEnum):
    """What /health says."""

    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"
    FAILED = "failed"


@dataclass(frozen=True)
class Health:
    """Status, and why it is not `ready`. since: seconds of the monotonic clock."""

    status: Status
    reason: str = ""
    since: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """The engine between two steps: requests that wait and that run, what the store holds, and what the driver counts
    of a card's memory for this process."""

    waiting: int = 0
    running: int = 0
    store: StoreStats | None = None
    card_bytes: int | None = None


@dataclass(eq=False)
class Job:
    """The requests of one call, in groups. The first of a group begins; the others, which have the same
    prompt, follow when it has been read, and read nothing.

    events: what the engine said, in order, for whoever answers. read_on: a caller who leaves wants the prompt
    read to its end. accepted: done when the engine has taken the first requests, or the error of its refusal.
    """

    groups: list[list[Request]]
    read_on: bool = False
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    accepted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    left: bool = False
    to_come: dict[str, list[Request]] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return sum(len(group) for group in self.groups)


@dataclass(eq=False)
class _Call:
    """Something else that the engine's thread shall do."""

    function: Callable[[Engine], Any]
    result: Future[Any] = field(default_factory=Future)

    def run(self, engine: Engine) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.function(engine))
        except Exception as error:
            self.result.set_exception(error)


class Worker:
    """Loads a model in a thread of its own and serves jobs with it.

    open_session(progress) makes the session, in the thread. on_end(error) is called in the event loop when
    the thread has ended: None where it was asked to. Counters (`failed_steps`, ...) only grow.
    """

    def __init__(
        self,
        open_session: Callable[[Callable[[int, int], None]], Session],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self.session: Session | None = None
        self.snapshot = Snapshot()
        self.failed_steps = 0
        self._failed_requests = 0
        self._num_live = 0
        self.durations: deque[float] = deque(maxlen=32)
        self._open_session = open_session
        self._on_end = on_end
        self._health = Health(Status.LOADING, "the model is being loaded")
        self._commands: queue.SimpleQueue[tuple[str, Job | _Call | None]] = queue.SimpleQueue()
        # A job that is queued after the last look at the queue would wait for ever.
        self._closing = threading.Lock()
        self._closed = False
        self._jobs: dict[str, Job] = {}
        self._started: dict[str, float] = {}
        self._step_began: float | None = None
        self._lost: dict[str, int] = {}
        self._card_bytes: int | None = None
        self._card_asked = float("-inf")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to load; to be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def end(self) -> None:
        """Have every request end with a StoppedError, and the thread, after the step it is in."""
        self._commands.put(("stop", None))

    async def stop(self) -> None:
        """`end`, and wait for the thread."""
        self.end()
        await asyncio.to_thread(self._thread.join, 30.0)

    @property
    def health(self) -> Health:
        """What is to be said now."""
        health, now = self._health, time.monotonic()
        if health.status is Status.DEGRADED and now - health.since > DEGRADED_S:
            health = self._health = Health(Status.READY)
        began = self._step_began
        if began is not None and now - began > STALLED_S and health.status is not Status.FAILED:
            return Health(Status.DEGRADED, f"a step has been running for {now - began:.0f} s", began)
        lower = None if self.session is None else self.session.engine.store.lower
        if health.status is Status.READY and lower is not None and lower.trouble:
            return Health(Status.DEGRADED, f"what is read may not be kept: {lower.trouble}", now)
        return health

    @property
    def live(self) -> int:
        """Requests of jobs that have not ended, waiting or running."""
        return self._num_live

    def retry_after(self, capacity: int) -> int:
        """Seconds after which a place should be free, from how long recent requests took."""
        if not self.durations:
            return 1
        mean = sum(self.durations) / len(self.durations)
        return max(1, min(60, round(mean * max(1, self.live) / max(1, capacity) / 2)))

    async def submit(self, job: Job) -> None:
        """Hand a job to the engine; returns when it has been accepted.

        Raises what Engine.add raises, and StoppedError: then nothing was queued. Where this is cancelled the
        job is left.
        """
        self._put("add", job)
        self._num_live += job.num_requests
        try:
            await asyncio.shield(job.accepted)
        except asyncio.CancelledError:
            self.leave(job)
            raise

    async def call(self, function: Callable[[Engine], T]) -> T:
        """What a function of the engine gives that is called in the engine's thread, between two steps.

        Raises what it raises, and StoppedError.
        """
        call = _Call(function)
        self._put("call", call)
        return cast(T, await asyncio.wrap_future(call.result))

    def _put(self, name: str, command: Job | _Call) -> None:
        with self._closing:
            if self._closed:
                raise StoppedError("The engine has stopped.", hint="See /health.")
            self._commands.put((name, command))

    def leave(self, job: Job) -> None:
        """Nobody waits for the job any more. Its requests end within one step; nothing happens to those that
        have ended."""
        if not job.left:
            job.left = True
            self._commands.put(("leave", job))

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self.session = self._open_session(self._progress)
            self._health = Health(Status.READY, since=time.monotonic())
            self._publish()
            self._serve()
        except BaseException as raised:
            error = raised
            self._health = Health(Status.FAILED, f"{type(raised).__name__}: {raised}", time.monotonic())
            if not isinstance(raised, PackhorseError):
                traceback.print_exception(raised, file=sys.stderr)
        stopped = StoppedError("The engine has stopped.", hint="See /health and the server's log.")
        self._end_all(error if isinstance(error, CardLostError) else stopped)
        try:
            if self.session is not None:
                self.session.close()
        except Exception as raised:  # what was to be kept may lie on a card that has gone
            traceback.print_exception(raised, file=sys.stderr)
            error = error or raised
        with contextlib.suppress(RuntimeError):  # the loop may have closed already
            self._loop.call_soon_threadsafe(self._on_end, error)

    def _progress(self, done: int, total: int) -> None:
        self._health = Health(Status.LOADING, f"{done} of {total} tensors loaded")

    @property
    def _engine(self) -> Engine:
        assert self.session is not None
        return self.session.engine

    def _serve(self) -> None:
        """Until told to stop: take commands, compute a step, deliver what came of it."""
        while self._take_commands():
            if self._engine.has_work:
                self._deliver(self._guarded(self._step))
            elif self._engine.is_behind:
                self._deliver(self._guarded(self._write))
            self._publish()

    def _take_commands(self) -> bool:
        """Waits for one where there is nothing to do. False: stop."""
        block = not self._engine.has_work and not self._engine.is_behind
        while True:
            try:
                name, job = self._commands.get(block=block)
            except queue.Empty:
                return True
            block = False
            if name == "stop" or job is None:
                return False
            if isinstance(job, _Call):
                job.run(self._engine)
            elif name == "add":
                self._begin(job)
            else:
                self._drop(job)
            self._publish()
            block = not self._engine.has_work and not self._engine.is_behind

    def _begin(self, job: Job) -> None:
        begun: list[Request] = []
        try:
            for first, *others in job.groups:
                self._add(job, first)
                begun.append(first)
                job.to_come[first.id] = others
        except Exception as error:
            for request in begun:
                self._engine.cancel(request.id)
                self._forget(request.id)
            self._call(self._refused, job, error)
            return
        self._call(self._accept, job)

    def _add(self, job: Job, request: Request) -> None:
        self._engine.add(request)
        self._jobs[request.id] = job
        self._started[request.id] = time.monotonic()

    def _drop(self, job: Job) -> None:
        """The caller has gone: cancel at once, or where it asked for that when its prompt has been read."""
        for group in job.groups:
            for request in group:
                self._drop_request(job, request)

    def _drop_request(self, job: Job, request: Request) -> None:
        sequence = self._engine.scheduler.find(request.id)
        if sequence is None or (job.read_on and not sequence.generated):
            return
        event = self._engine.cancel(request.id)
        assert event is not None
        self._deliver([event])

    def _step(self) -> list[Event]:
        self._step_began = time.monotonic()
        try:
            return self._engine.step()
        finally:
            self._step_began = None

    def _write(self) -> list[Event]:
        self._engine.write_behind(wait=True)
        return []

    def _guarded(self, work: Callable[[], list[Event]]) -> list[Event]:
        """What a step gives, or where it fails, what that ends."""
        try:
            return work()
        except CardLostError:
            raise
        except Exception as error:
            return self._survive(error)

    def _survive(self, error: Exception) -> list[Event]:
        """A step failed: whoever is at fault ends with an error, the others go on.

        Raises StoppedError where nobody is left whose next step would show that the engine can go on, and a
        prompt of one token shows that it cannot.
        """
        self.failed_steps += 1
        traceback.print_exception(error, file=sys.stderr)
        reason = f"{type(error).__name__}: {error}"
        failed = StepError(f"The step that computed this request failed: {reason}")
        events: list[Event] = self._engine.recover(failed)
        done = {event.request_id for event in events}
        # A step that failed while it reported has ended some requests whose events are lost.
        lost = [i for i in self._jobs if i not in done and self._engine.scheduler.find(i) is None]
        events += [_ended(request_id, failed) for request_id in lost]
        self._failed_requests += len(events)
        why = (
            f"{self.failed_steps} steps failed and ended {self._failed_requests} requests, the last: {reason}"
        )
        self._health = Health(Status.DEGRADED, why, time.monotonic())
        if not self._engine.scheduler.running:
            try:
                self._engine.probe()
            except Exception as again:
                raise StoppedError(
                    f"A step failed with {reason}, and so does a prompt of one token.",
                    hint="The engine is given up. With --supervise it is started again.",
                ) from again
        return events

    def _deliver(self, events: Sequence[Event]) -> None:
        """Pass events on in one call, and begin what has waited for a prompt to be read."""
        deliveries: list[tuple[Job, Event]] = []
        for event in events:
            job = self._jobs[event.request_id]
            deliveries.append((job, event))
            if event.usage.generated_len or event.finish is not None:
                deliveries += self._follow(job, event.request_id)
            if event.finish is not None:
                self._forget(event.request_id)
            elif job.left and event.usage.generated_len:
                # Its prompt has been read to the end, as its caller had asked before it left.
                ended = self._engine.cancel(event.request_id)
                if ended is not None:
                    deliveries.append((job, ended))
                    self._forget(event.request_id)
        if deliveries:
            self._call(self._receive, deliveries)

    def _follow(self, job: Job, request_id: str) -> list[tuple[Job, Event]]:
        """Begin the requests that share the prompt of one that has been read."""
        failed: list[tuple[Job, Event]] = []
        for request in job.to_come.pop(request_id, []):
            if job.left:
                failed.append((job, _ended(request.id, StoppedError("The caller has gone."))))
                continue
            try:
                self._add(job, request)
            except Exception as error:
                failed.append((job, _ended(request.id, error)))
        return failed

    def _forget(self, request_id: str) -> None:
        del self._jobs[request_id]
        self.durations.append(time.monotonic() - self._started.pop(request_id))

    def _end_all(self, error: PackhorseError) -> None:
        """Every request that is live, or still in a command, ends with `error`."""
        events = [(job, _ended(request_id, error)) for request_id, job in self._jobs.items()]
        events += [
            (job, _ended(request.id, error))
            for job in set(self._jobs.values())
            for others in job.to_come.values()
            for request in others
        ]
        self._jobs.clear()
        self._call(self._receive, events)
        with self._closing:
            self._closed = True
        while not self._commands.empty():
            name, job = self._commands.get()
            if isinstance(job, _Call) and job.result.set_running_or_notify_cancel():
                job.result.set_exception(error)
            elif name == "add" and job is not None:
                self._call(self._refused, job, error)

    def _publish(self) -> None:
        scheduler, stats = self._engine.scheduler, self._engine.store.stats
        card = None if self.session is None else self.session.card
        if card is not None and time.monotonic() - self._card_asked >= CARD_S:
            self._card_bytes, self._card_asked = card.used_bytes(), time.monotonic()
        self.snapshot = Snapshot(len(scheduler.waiting), len(scheduler.running), stats, self._card_bytes)
        lost = self._engine.lost_records
        if lost != self._lost:
            self._lost = lost
            line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "lost_records": lost}
            print(json.dumps(line), file=sys.stderr, flush=True)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)

    # What follows runs in the event loop.

    def _accept(self, job: Job) -> None:
        if not job.accepted.done():
            job.accepted.set_result(None)

    def _refused(self, job: Job, error: Exception) -> None:
        self._num_live -= job.num_requests
        if not job.accepted.done():
            job.accepted.set_exception(error)
            # A caller that has left does not look at it.
            job.accepted.exception()

    def _receive(self, deliveries: Sequence[tuple[Job, Event]]) -> None:
        for job, event in deliveries:
            if event.finish is not None:
                self._num_live -= 1
            job.events.put_nowait(event)


def _ended(request_id: str, error: Exception) -> Event:
    return Event(request_id, Usage(0, 0, 0), finish=FinishReason.ERROR, error=error)
