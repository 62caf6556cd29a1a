"""Virtual time and processes: every simulated process has an event loop of its own, and one `World` runs them all.

Nothing here waits: when no callback is ready, time jumps to the next timer. A process can be stopped (its callbacks
wait for `resume`) or killed (they never run). It knows no network and no node.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from heapq import heappop, heappush
from typing import ParamSpec, TypeVar, TypeVarTuple, Unpack, cast

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# A process that computes without ever waiting for time is stuck.
_MAX_CALLBACKS_AT_ONE_INSTANT = 200_000


class ProcessKilled(BaseException):
    """Raised inside the engine of a process that was killed in mid-step; nothing may catch it but the simulation."""


class Livelock(Exception):
    """Callbacks follow one another without end while time stands still."""


class Callback:
    """A call that is due at `when_s`; stands in for asyncio's handles."""

    __slots__ = ("args", "context", "function", "is_cancelled", "process", "when_s")

    def __init__(
        self,
        process: Process,
        when_s: float,
        function: Callable[..., object],
        args: tuple[object, ...],
        context: contextvars.Context | None,
    ) -> None:
        self.process = process
        self.when_s = when_s
        self.is_cancelled = False
        self.function = function
        self.args = args
        self.context = contextvars.copy_context() if context is None else context

    def cancel(self) -> None:
        self.is_cancelled = True
        # Whatever it holds is free now, though it lies among the timers until its time comes.
        self.function, self.args = _do_nothing, ()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.when_s


def _do_nothing() -> None:
    """What a cancelled callback does."""


class World:
    """The order of everything that happens. `now_s` is its time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_callbacks = 0
        # How many `run_until` are under way, one inside another.
        self.depth = 0
        # Whose callback runs now.
        self.running: Process | None = None
        self._ready: deque[Callback] = deque()
        # Every callback passes here and every timer there: one call less than a method.
        self.add_ready: Callable[[Callback], None] = self._ready.append
        self.timers: list[tuple[float, int, Callback]] = []
        self.timer_numbers = itertools.count()

    def run_until(self, end_s: float, is_done: Callable[[], bool] | None = None) -> None:
        """Runs everything that is due up to `end_s`, or until `is_done`, which is asked whenever time moves on.

        May be called from inside a callback: the rest of that callback comes after what it waits for. Raises Livelock.
        """
        outer, running = asyncio._get_running_loop(), self.running
        self.depth += 1
        try:
            while True:
                self._run_ready()
                if is_done is not None and is_done():
                    return
                # A callback that let the world go on may have gone beyond: the rest is for whoever waits for later.
                if self.now_s > end_s:
                    return
                if not self._ready and not self._advance(end_s):
                    self.now_s = max(self.now_s, end_s)
                    return
        finally:
            self.depth -= 1
            self.running = running
            asyncio._set_running_loop(outer)

    def _run_ready(self) -> None:
        """Everything that is due, or up to the first callback after which it is later than before."""
        ready, set_running_loop, now_s = self._ready, asyncio._set_running_loop, self.now_s
        num_left = _MAX_CALLBACKS_AT_ONE_INSTANT
        while ready:
            callback = ready.popleft()
            process = callback.process
            if callback.is_cancelled or process.is_dead:
                continue
            if process.is_stopped:
                process.held.append(callback)
                continue
            num_left -= 1
            if not num_left:
                raise Livelock(f"{process.name} is busy without end at {self.now_s:.3f} s")
            set_running_loop(process.event_loop)
            self.running = process
            self.num_callbacks += 1
            # In place, and not in a method of the callback: there are thousands of them.
            try:
                callback.context.run(callback.function, *callback.args)
            except (ProcessKilled, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                process.call_exception_handler({"message": "a callback failed", "exception": error})
            if self.now_s != now_s:
                return

    def _advance(self, end_s: float) -> bool:
        """Moves time on to the next timer that anybody still waits for; False when there is none up to `end_s`."""
        timers = self.timers
        while timers and timers[0][0] <= end_s:
            when_s, _, callback = heappop(timers)
            if callback.is_cancelled or callback.process.is_dead:
                continue
            self.now_s = max(self.now_s, when_s)
            self._ready.append(callback)
            while timers and timers[0][0] <= when_s:
                self._ready.append(heappop(timers)[2])
            return True
        return False


class VirtualClock:
    """The Clock of every simulated process."""

    __slots__ = ("_world",)

    def __init__(self, world: World) -> None:
        self._world = world

    def now_s(self) -> float:
        return self._world.now_s

    def unix_ns_at(self, monotonic_s: float) -> int:
        return round(monotonic_s * 1e9)


class Process:
    """One process: an event loop that never blocks and can be stopped and killed.

    `on_error` hears of exceptions that nobody handles.
    """

    def __init__(self, world: World, name: str, on_error: Callable[[str, BaseException | None], None]) -> None:
        self.world = world
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        # Threads of its own go on already; its event loop does so with `resume`.
        self.is_waking = False
        self.held: deque[Callback] = deque()
        # The process as asyncio sees it: of an event loop it has what code without sockets and signals uses.
        self.event_loop = cast("asyncio.AbstractEventLoop", self)
        self._on_error = on_error
        # In the order in which they began, which a set would not keep.
        self._tasks: dict[asyncio.Task[object], None] = {}

    @property
    def num_tasks(self) -> int:
        """Coroutines that have not ended."""
        return len(self._tasks)

    def kill(self) -> None:
        """Nothing of the process runs any more. What it held is kept until the simulation is over."""
        self.is_dead = True

    def stop_running(self) -> None:
        """As SIGSTOP does."""
        self.is_stopped = True
        self.is_waking = False

    @property
    def is_asleep(self) -> bool:
        """Whether not even a thread beside the event loop runs."""
        return self.is_stopped and not self.is_waking

    def resume(self) -> None:
        """As SIGCONT does: what came meanwhile happens now, in order."""
        self.is_stopped = self.is_waking = False
        held, self.held = self.held, deque()
        for callback in held:
            self.world.add_ready(callback)

    def close_tasks(self) -> None:
        """Ends every coroutine, so that none is left to the garbage collector. The last thing done with a process."""
        self.is_dead = self.is_stopped = False
        self._on_error = lambda message, error: None
        for _ in range(20):
            open_tasks = [task for task in self._tasks if not task.done()]
            if not open_tasks:
                break
            for task in open_tasks:
                task.cancel()
            self.world.run_until(self.world.now_s)
        for task in self._tasks:
            # Its next step was due when the process died.
            with contextlib.suppress(RuntimeError):
                cast("Coroutine[object, object, object]", task.get_coro()).close()
        self.is_dead = True

    # asyncio.AbstractEventLoop.

    def time(self) -> float:
        return self.world.now_s

    # False. Each future and each task asks, so it is asked for without a call of ours.
    get_debug = staticmethod(bool)

    def is_running(self) -> bool:
        return not self.is_dead

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[T]:
        return asyncio.Future(loop=self.event_loop)

    def create_task(
        self,
        coro: Coroutine[object, object, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self.event_loop, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        made = Callback(self, self.world.now_s, callback, args, context)
        self.world.add_ready(made)
        return made  # type: ignore[return-value]  # a cast would cost a call for each callback

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        # As `call_at`, which half of the timers would need one more call for.
        world = self.world
        made = Callback(self, world.now_s + delay, callback, args, context)
        heappush(world.timers, (made.when_s, next(world.timer_numbers), made))
        return made  # type: ignore[return-value]  # as above

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        world = self.world
        made = Callback(self, when, callback, args, context)
        heappush(world.timers, (when, next(world.timer_numbers), made))
        return made  # type: ignore[return-value]  # as above

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """What a thread would do is done at once, a moment later."""
        del executor
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(work)
        return future

    def call_exception_handler(self, context: dict[str, object]) -> None:
        if not self.is_dead:
            error = context.get("exception")
            self._on_error(str(context.get("message")), error if isinstance(error, BaseException) else None)


class CallbackExecutor(Executor):
    """An executor whose work is done by callbacks of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except Exception as error:
                    future.set_exception(error)

        self._process.call_soon(work)
        return future
