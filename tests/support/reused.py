"""Functions whose calls are noted in the file that the environment names."""

from __future__ import annotations

import os


def noted(stage: str, text: str) -> str:
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{stage}={text}\n")
    if text == "bad":
        raise ValueError("bad")
    if text == "lost":
        raise ConnectionError("lost")
    return text


def upper(text: str, suffix: str = "") -> str:
    return noted("upper", text).upper() + suffix


def length(text: str) -> int:
    return len(noted("length", text))


def words(text: str) -> list[str]:
    return noted("words", text).split()


def is_long(text: str) -> bool:
    return len(noted("is_long", text)) > 2
