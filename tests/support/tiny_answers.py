"""Reference answers of transformers with a tiny model, text by text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def greedy(
    folder: Path,
    texts: Sequence[str],
    tokens: int = 8,
    system: str = "",
    change: Callable[[Any], None] | None = None,
    is_chat: bool = True,
) -> list[str]:
    """Return transformers' answer to each text alone, with the same weights or changed ones.

    Without a chat, it continues the text.

    The last character is left out if it is incomplete in bytes, as in vLLM.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # several wait for each other on a busy machine, for minutes
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if change is not None:
        change(model)
    found = []
    for text in texts:
        chat = [{"role": "system", "content": system}] if system else []
        chat.append({"role": "user", "content": text})
        if tokenizer.chat_template is None or not is_chat:
            prompt = "\n\n".join(message["content"] for message in chat)
        else:
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        given = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**given, max_new_tokens=tokens, do_sample=False)
        new = out[0, given["input_ids"].shape[1] :]
        found.append(tokenizer.decode(new, skip_special_tokens=True).rstrip("\ufffd"))
    return found


def of_media(
    folder: Path, model: Any, asked: Sequence[tuple[list[Any], Mapping[str, Any]]]
) -> list[str]:
    """Return transformers' answer to each message alone: its parts, and its processor's files."""
    import torch
    from transformers import AutoProcessor

    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(folder)
    loaded = model.from_pretrained(folder, dtype=torch.float32)
    found = []
    for content, files in asked:
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        given = processor(text=prompt, return_tensors="pt", **files)
        out = loaded.generate(**given, max_new_tokens=8, do_sample=False)
        new = out[0, given["input_ids"].shape[1] :]
        found.append(processor.tokenizer.decode(new, skip_special_tokens=True).rstrip("\ufffd"))
    return found


def vectors(folder: Path, texts: Sequence[str]) -> Any:
    """Return each text's last hidden state, of its last token, with length 1: ``(texts, 64)``."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        last = [
            model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in texts
        ]
    return torch.nn.functional.normalize(torch.stack(last)).numpy()
