"""A tiny language model with random weights, and a tokenizer trained on the spot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "user assistant system: summarise, classify, answer yes or no.",
    '{"name": "Ada", "age": 36, "tags": ["a", "b"]} 0123456789',
]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}

_MAX_STEPS = 400
_LEARNT = 0.01


def make(
    folder: Path,
    longest: int = 256,
    seed: int = 0,
    text: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """Write a Qwen2, by default with a few thousand weights, and return its folder.

    Args:
        folder: The folder to write to.
        longest: Maximum sequence length in tokens.
        seed: Seed of the weights.
        text: Texts to train the tokenizer on, besides `TEXT`.
        sizes: Arguments of `Qwen2Config` for its layers, whose weights are then bfloat16.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000 if text else 400, special_tokens=special, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([*TEXT, *text], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(fast),
        **(sizes or TINY),
        max_position_embeddings=longest,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    (model.bfloat16() if sizes else model).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def teach(folder: Path, lessons: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Train the model of a folder until it ends each conversation with its last message.

    Args:
        folder: A folder written by `make`.
        lessons: Conversations in OpenAI's form, each with the answer last.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)
    asked = [_asked(tokenizer, lesson[:-1]) for lesson in lessons]
    answers = [f"{lesson[-1]['content']}{tokenizer.eos_token}" for lesson in lessons]
    whole = [question + answer for question, answer in zip(asked, answers)]
    given = tokenizer(whole, return_tensors="pt", padding=True)
    labels = given["input_ids"].clone()
    for row, question, text in zip(labels, asked, whole):
        answer = len(tokenizer(text)["input_ids"]) - len(tokenizer(question)["input_ids"])
        row[:-answer] = -100  # excluded from the loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is so small that more threads would wait for each other
    for _ in range(_MAX_STEPS):
        loss = model(**given, labels=labels).loss
        if loss.item() < _LEARNT:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    assert loss.item() < _LEARNT, f"loss {loss.item():.4f} after {_MAX_STEPS} steps"
    model.save_pretrained(folder)


def _asked(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    found: str = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    return found
