"""Labels of a text column, chosen by a language model."""

from __future__ import annotations

from collections.abc import Collection, Mapping

LABEL_SAMPLING = {"temperature": 0, "max_tokens": 64}
"""Sampling parameters of a language model that chooses labels; part of fragment keys."""


def label_prompt(column: str, labels: Collection[str] | Mapping[str, str]) -> str:
    """The template by which a language model chooses a label; it is part of fragment keys."""
    meanings = labels.items() if isinstance(labels, Mapping) else ((label, "") for label in labels)
    lines = [f"- {label}: {meaning}" if meaning else f"- {label}" for label, meaning in meanings]
    listed = "\n".join(lines).replace("{", "{{").replace("}", "}}")
    return (
        "Which of these labels fits the text best? Answer with the label alone.\n\n"
        f"{listed}\n\nText: {{{column}}}"
    )
