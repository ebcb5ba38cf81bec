"""Ends a program in order when it is told to: at once, but never in the middle of somebody else's code.

A handler that raises is no use here. It raises wherever the main thread happens to be, which may be inside of Ray or
with a lock of `logging` in hand; the program then hangs on that lock while it tries to end.
"""

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Generic, TypeVar

__all__ = ["StopRequested", "StopSignal"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How soon a signal is noticed.
_CHECK_INTERVAL_S = 0.1
# What a shell reports for a program that Ctrl-C ended.
_EXIT_CODE_FORCED = 128 + signal.SIGINT

ResultT = TypeVar("ResultT")


class StopRequested(BaseException):
    """The program was told to end. A BaseException, so that no `except Exception` on its way keeps it."""


class StopSignal:
    """SIGINT, SIGTERM and SIGHUP, as something to wait for. Belongs to the main thread.

    The first signal makes `run`, `sleep` and `check` raise StopRequested. Once `begin_ending` was called, another one
    runs its action and ends the process without further ado.
    """

    def __init__(self) -> None:
        self._is_requested = False
        self._force: Callable[[], object] | None = None
        self._calls: queue.SimpleQueue[Callable[[], None]] | None = None
        self.has_abandoned = False
        """Whether a call is still running that `run` did not wait for."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Take the signals for the time of the block, which ends quietly with StopRequested."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        try:
            self.install()
            yield
        except StopRequested:
            pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def install(self) -> None:
        """Take the signals, and take them back from a library that has taken them since."""
        for number in _SIGNALS:
            # nohup ignores SIGHUP, and means it.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def check(self) -> None:
        """Raise StopRequested where a signal has come."""
        if self._is_requested:
            raise StopRequested

    def sleep(self, duration_s: float) -> None:
        """Wait, but no longer than until a signal comes. Raises StopRequested."""
        deadline_s = time.monotonic() + duration_s
        self.check()
        while (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _CHECK_INTERVAL_S))
            self.check()

    def run(self, action: Callable[[], ResultT]) -> ResultT:
        """The result of `action`, which may block for long and runs on a thread of its own.

        Raises what it raises, and StopRequested at a signal; then the call is left behind, and `has_abandoned` says so.

        All calls run on one thread, which never ends: the kernel kills what ray.init has started as soon as the thread
        that started it ends (PR_SET_PDEATHSIG goes by threads).
        """
        self.check()
        call = _Call(action)
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_make_calls, args=(self._calls,), daemon=True).start()
        self._calls.put(call.make)
        while not call.is_over.wait(_CHECK_INTERVAL_S):
            if self._is_requested:
                self.has_abandoned = True
                raise StopRequested
        return call.result()

    def begin_ending(self, force: Callable[[], object]) -> None:
        """From now on a signal calls `force` and exits."""
        self._force = force

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._is_requested = True
        if self._force is not None:
            self._force()
            os._exit(_EXIT_CODE_FORCED)


def _make_calls(calls: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        calls.get()()


class _Call(Generic[ResultT]):
    """A call that another thread makes."""

    def __init__(self, action: Callable[[], ResultT]) -> None:
        self.is_over = threading.Event()
        self._action = action
        self._outcome: list[ResultT] = []
        self._error: BaseException | None = None

    def make(self) -> None:
        try:
            self._outcome.append(self._action())
        except BaseException as error:
            self._error = error
        self.is_over.set()

    def result(self) -> ResultT:
        if self._error is not None:
            raise self._error
        return self._outcome[0]
