"""Exceptions that are hard to handle."""

from __future__ import annotations

import asyncio


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class NoRepr(Exception):
    def __repr__(self) -> str:
        raise KeyboardInterrupt


class NoStatus(Exception):
    @property
    def status_code(self):
        raise SystemExit(3)


class NotPickled(Exception):
    def __reduce__(self):
        raise TypeError("not pickled")


class Lying(Exception):
    @property
    def __class__(self):
        raise RuntimeError("no class")


def odd_syntax() -> BaseException:
    error = SyntaxError("odd")
    error.lineno, error.offset, error.text = 3, "a", 5  # type: ignore[assignment]  # odd
    return error


def local_class() -> BaseException:
    class OnlyHere(Exception):
        pass

    return OnlyHere("of the worker alone")


EXCEPTIONS = {
    "CancelledError": lambda: asyncio.CancelledError(),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("stop"),
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": lambda: GeneratorExit(),
    "StopIteration": lambda: StopIteration(3),
    "NotPickled": lambda: NotPickled("pickle"),
    "BaseException": lambda: BaseException("base"),
    "NoText": lambda: NoText(),
    "NoRepr": lambda: NoRepr("text"),
    "NoStatus": lambda: NoStatus("status"),
    "OnlyHere": local_class,
    "Lying": lambda: Lying("text"),
    "SyntaxError": odd_syntax,
    "Surrogates": lambda: ValueError("a\udc00b\0c"),
    "Huge": lambda: ValueError("x" * 1_000_000),
    "BaseExceptionGroup": lambda: BaseExceptionGroup(
        "several", [ValueError("the first"), KeyboardInterrupt("the second")]
    ),
    "ExceptionGroup": lambda: ExceptionGroup("several", [KeyError("inner")]),
}
