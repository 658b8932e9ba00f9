"""Deadlines that end this process, even while native code holds the interpreter lock.

Each deadline is a kernel timer. Nothing in the process needs to run when it expires, and user code
that uses `faulthandler` or SIGALRM does not disturb it. At the deadline a signal prints the stack
of every thread to standard error and ends the process. One second later SIGKILL ends a process that
could not handle the signal, such as one that is stopped.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

_IS_LINUX = sys.platform == "linux"
_KILL_SECONDS = 1.0
_CLOCK_MONOTONIC = 1
_SIGEV_SIGNAL = 0


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """End this process if the body takes longer than `seconds`; None for no deadline.

    The driver then sees a dead worker and halves the rows that it was computing. Several deadlines
    may be active at a time. Costs about 25 microseconds.
    """
    if seconds is None:
        yield
        return
    with ExitStack() as stack:
        if _IS_LINUX:
            for number, after in ((_signal(), seconds), (signal.SIGKILL, seconds + _KILL_SECONDS)):
                stack.callback(_libc().timer_delete, _started(number, after))
        else:  # needs the interpreter lock when it expires
            timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
        yield


def ended_by_deadline(code: int) -> bool:
    """Return whether a process ended with this code of `subprocess.Popen` because of a deadline."""
    return _IS_LINUX and code == -_signal()


def _signal() -> int:
    """Return a real-time signal that ends the process by default and that no library uses."""
    return int(signal.SIGRTMAX) - 3


def _started(number: int, seconds: float) -> ctypes.c_void_p:
    """Start a POSIX timer that sends a signal to this process."""
    timer = ctypes.c_void_p()
    event = (ctypes.c_int * 32)(0, 0, number, _SIGEV_SIGNAL)  # `struct sigevent`, of 64 bits
    spec = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))  # `struct itimerspec`
    if _libc().timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create failed")
    if _libc().timer_settime(timer, 0, ctypes.byref(spec), None):
        raise OSError(ctypes.get_errno(), "timer_settime failed")
    return timer


@lru_cache(maxsize=1)
def _libc() -> Any:
    """Return the C library, after registering the handler that prints the stacks."""
    if sys.__stderr__ is not None:
        faulthandler.register(_signal(), file=sys.__stderr__, all_threads=True, chain=True)
    library = ctypes.CDLL(None, use_errno=True)
    # Before glibc 2.34 the timers are in a separate library.
    return (
        library if hasattr(library, "timer_create") else ctypes.CDLL("librt.so.1", use_errno=True)
    )
