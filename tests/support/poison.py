"""Exceptions that are hard to handle."""

from __future__ import annotations

import asyncio
import builtins

Group = getattr(builtins, "BaseExceptionGroup", None)  # from Python 3.11 on


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class NoRepr(Exception):
    def __repr__(self) -> str:
        raise KeyboardInterrupt


class Liar(ConnectionError):
    @property
    def __class__(self):
        raise ValueError("no class")

    @property
    def __traceback__(self):
        raise ValueError("no traceback")


class NoStatus(Exception):
    @property
    def status_code(self):
        raise SystemExit(3)


class Nameless(type):
    __name__ = property(lambda cls: 1 / 0)


class Unnamed(Exception, metaclass=Nameless):
    pass


class NotPickled(Exception):
    def __reduce__(self):
        raise TypeError("not pickled")


def local_class() -> BaseException:
    class OnlyHere(Exception):
        pass

    return OnlyHere("of the worker alone")


def odd_syntax_error() -> BaseException:
    error = SyntaxError("odd")
    error.lineno, error.text, error.filename, error.offset = "abc", 5, 3, "q"
    return error


def odd_file_name() -> BaseException:
    exec(compile("raise ValueError('x')", "a\udcffb", "exec"))
    raise AssertionError("unreachable")


EXCEPTIONS = {
    "SyntaxError": odd_syntax_error,
    "FileName": odd_file_name,
    "CancelledError": lambda: asyncio.CancelledError(),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("stop"),
    "GeneratorExit": lambda: GeneratorExit(),
    "SystemExit": lambda: SystemExit(3),
    "StopIteration": lambda: StopIteration(3),
    "BaseException": lambda: BaseException("base"),
    "NoText": lambda: NoText(),
    "NoRepr": lambda: NoRepr("text"),
    "Liar": lambda: Liar("lies"),
    "NoStatus": lambda: NoStatus("status"),
    "Unnamed": lambda: Unnamed("unnamed"),
    "NotPickled": lambda: NotPickled("pickle"),
    "OnlyHere": local_class,
    "Surrogates": lambda: ValueError("a\udc00b\0c"),
    "Huge": lambda: ValueError("x" * 100_000_000),
}
if Group is not None:
    EXCEPTIONS["BaseExceptionGroup"] = lambda: Group(
        "several", [ValueError("the first"), KeyboardInterrupt("the second")]
    )
    EXCEPTIONS["ExceptionGroup"] = lambda: Group("several", [KeyError("inner")])
