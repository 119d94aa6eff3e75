"""What the two twins do in different ways: run something beside the caller, wait, block, sleep.

Each pair has one interface. `tools/unasync.py` replaces the name of the first by the name of the second.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Generic, ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Requests that were given up while they connected, until they are gone.
Strays: TypeAlias = set[asyncio.Future[None]]

AsyncSemaphore = asyncio.Semaphore
Semaphore = threading.Semaphore

AsyncLock = asyncio.Lock
Lock = threading.Lock

async_sleep = asyncio.sleep
sleep = time.sleep


class AsyncSending(Generic[T]):
    """A request on its way. The library below loses the socket of a connect that is cancelled, so a cancel lets the
    connect end and only then ends the request.
    """

    def __init__(self) -> None:
        self._connected = False
        self._left = False

    def begin(self) -> None:
        """Told when the connection stands and the request is about to be written."""
        self._connected = True
        if self._left:
            raise asyncio.CancelledError

    async def wait(self, work: Callable[[], Awaitable[T]], drop: Callable[[T], Awaitable[None]], strays: Strays) -> T:
        """Does the work; when this is cancelled, `drop` gets what it returns all the same. `strays` are what may linger."""
        task = asyncio.ensure_future(work())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._left = True
            if self._connected:
                task.cancel()

            async def tidy() -> None:
                await asyncio.wait({task})
                if not task.cancelled() and task.exception() is None:
                    await drop(task.result())

            stray = asyncio.ensure_future(tidy())
            strays.add(stray)
            stray.add_done_callback(strays.discard)
            if self._connected:
                await asyncio.wait({stray})
            raise

    @staticmethod
    async def finish(strays: Strays) -> None:
        """Waits for what lingers; its connects are bounded."""
        if strays:
            await asyncio.wait(set(strays))


class Sending(Generic[T]):
    """A request on its way; a thread cannot be cancelled."""

    def begin(self) -> None:
        """Told when the connection stands and the request is about to be written."""

    def wait(self, work: Callable[[], T], drop: Callable[[T], None], strays: Strays) -> T:
        """Does the work."""
        del drop, strays
        return work()

    @staticmethod
    def finish(strays: Strays) -> None:
        """Nothing lingers."""


class AsyncTask(Generic[T]):
    """Work beside the caller. Whoever starts it waits for it; a failure that nobody asks for makes no noise."""

    def __init__(self, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> None:
        self._task = asyncio.ensure_future(work(*args, **kwargs))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def wait(self, timeout: float | None = None) -> bool:
        """Whether it ended within `timeout` seconds. Cancelling the wait does not cancel the work."""
        if self._task is not asyncio.current_task():
            await asyncio.wait({self._task}, timeout=timeout)
        return self._task.done()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._task.done()

    def result(self) -> T:
        """What it returned or raised; only after its end."""
        return self._task.result()


class Task(Generic[T]):
    """The same on a thread, which never keeps the interpreter from ending."""

    def __init__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        self._value: list[T] = []
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._value.append(work(*args, **kwargs))
            except BaseException as exc:  # handed to whoever asks for the result
                self._error = exc

        self._thread = threading.Thread(target=run, name="useshards", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it ended within `timeout` seconds."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def done(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def result(self) -> T:
        """What it returned or raised; only after its end."""
        if self._error is not None:
            raise self._error
        return self._value[0]


async def async_blocking(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs what blocks (local files) off the event loop. A cancel waits for it, so that nothing is used after its end."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def blocking(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs what blocks (local files)."""
    return work(*args, **kwargs)


async def async_tell(callback: Callable[[bytes], object], data: bytes) -> None:
    """Calls back, and waits for a callback that is a coroutine."""
    pending = callback(data)
    if inspect.isawaitable(pending):
        await pending


def tell(callback: Callable[[bytes], object], data: bytes) -> None:
    """Calls back."""
    callback(data)
