"""Tiny models for the pipelines of transformers, trained on the spot on a few inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tiny_llm import TINY, make

_STEPS = 60
_MEDIA_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<image>{% elif content['type'] == 'audio' %}<|AUDIO|>"
    "{% else %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_classifier(folder: Path, examples: Sequence[tuple[Any, str]]) -> Path:
    """Make a Bert that knows the labels of some texts, or pairs of texts."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    texts = [list(text) if isinstance(text, tuple) else [text] for text, _ in examples]
    make(folder, text=[part for parts in texts for part in parts])  # for its tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=96,
        pad_token_id=tokenizer.pad_token_id,
        **_labels([label for _, label in examples]),
    )
    model = BertForSequenceClassification(config)
    given = tokenizer(*map(list, zip(*texts)), padding=True, return_tensors="pt")
    _teach(model, [label for _, label in examples], lambda: model(**given).logits)
    model.save_pretrained(folder)
    return folder


def image_text_model(folder: Path) -> Path:
    """Make an Idefics3 with random weights, which takes images of 32x32 pixels as 4 tokens.

    Its processor needs Pillow alone, and vLLM knows it without torchvision.
    """
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )

    tokenizer = AutoTokenizer.from_pretrained(make(folder))  # its model is replaced
    tokenizer.add_special_tokens({"additional_special_tokens": ["<global-img>"]})
    side = {"longest_edge": 32}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=_MEDIA_CHAT)
    sizes = {name: TINY[name] for name in ("hidden_size", "intermediate_size")}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    config = Idefics3Config(
        vision_config={"image_size": 32, "patch_size": 8, **sizes},
        text_config=LlamaConfig(
            vocab_size=len(tokenizer), max_position_embeddings=256, num_key_value_heads=2,
            eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id, **sizes,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def audio_text_model(folder: Path) -> Path:
    """Make a Qwen2-Audio with random weights, which takes 40 ms of sound as a token."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tokenizer = AutoTokenizer.from_pretrained(make(folder, 1024))  # its model is replaced
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>"]})
    sounds = WhisperFeatureExtractor(feature_size=16)
    processor = Qwen2AudioProcessor(sounds, tokenizer, chat_template=_MEDIA_CHAT)
    torch.manual_seed(0)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, **ends, **TINY}
    config = Qwen2AudioConfig(
        audio_config={
            "num_mel_bins": 16, "d_model": 64, "encoder_layers": 2,
            "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "initializer_range": 0.2,
        },
        text_config={"model_type": "qwen2", "initializer_range": 0.2, **text},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )  # fmt: skip
    model = Qwen2AudioForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")  # transformers 5.19 doubles a prefix
    weights = {name.replace(".model.model.", ".model."): each for name, each in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    processor.save_pretrained(folder)
    return folder


def image_classifier(folder: Path, examples: Sequence[tuple[Any, str]]) -> Path:
    """Make a vision transformer that knows the labels of some images."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    torch.manual_seed(0)
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32})
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        **_labels([label for _, label in examples]),
    )
    model = ViTForImageClassification(config)
    given = processor([image for image, _ in examples], return_tensors="pt")
    _teach(model, [label for _, label in examples], lambda: model(**given).logits)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def resnet(folder: Path, examples: Sequence[tuple[Any, str]], mean: Any, std: Any) -> Path:
    """Make a small ResNet that knows the labels of some images."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        **_labels([label for _, label in examples]),
    )
    model = ResNetForImageClassification(config).eval()
    pixels = np.stack([(image / 255 - mean) / std for image, _ in examples]).transpose(0, 3, 1, 2)
    with torch.no_grad():
        features = model.resnet(torch.from_numpy(pixels.astype(np.float32))).pooler_output
        wanted = [model.config.label2id[label] for _, label in examples]
        found = torch.linalg.lstsq(
            features.flatten(1), 10 * torch.eye(len(model.config.label2id))[wanted]
        )
        model.classifier[1].weight.copy_(found.solution.T)
        model.classifier[1].bias.zero_()
    model.save_pretrained(folder)
    return folder


def _labels(given: Sequence[str]) -> dict[str, Any]:
    names = list(dict.fromkeys(given))
    return {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}


def _teach(model: Any, labels: Sequence[str], logits: Callable[[], Any]) -> None:
    import torch

    wanted = torch.tensor([model.config.label2id[label] for label in labels])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    model.train()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other on a busy machine, for minutes
    for _ in range(_STEPS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits(), wanted).backward()
        optimizer.step()
    torch.set_num_threads(threads)
    model.eval()
    assert logits().argmax(-1).tolist() == wanted.tolist()
