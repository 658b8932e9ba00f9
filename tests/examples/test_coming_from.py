"""The pages for users of other systems: our side of each snippet runs, and its changes are counted.

The snippets with an engine are in `tests/providers/test_coming_from_engines.py`.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.coming_from_data import write_data
from support.data import read_stage
from support.llm_server import KEY, serving
from support.results import Run
from support.snippets import PAGES, Snippet, counted, snippets, write_module

ALL = [snippet for page in PAGES for snippet in snippets(page)]
ON_ENGINES = {("ray-data", "Language model in vLLM")}
DECLARED = {("ray-data", "GPUs and concurrency")}
"""Snippets that need a GPU: only their declaration is tested."""

IDS = [1, 2, 3, 4]
TEXTS = ["Great lamp", "Broken on arrival", "Fine", "Great chair, great price"]
WORDS = [
    ("1-0", 1, "Great", 5), ("1-1", 1, "lamp", 5), ("2-0", 2, "Broken", 1), ("2-1", 2, "on", 1),
    ("2-2", 2, "arrival", 1), ("3-0", 3, "Fine", 3), ("4-0", 4, "Great", 4), ("4-1", 4, "chair,", 4),
    ("4-2", 4, "great", 4), ("4-3", 4, "price", 4),
]  # fmt: skip
"""Rows of the words: id, id of the text, word, stars."""


def columns(names: str, rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return dict(zip(names.split(), map(list, zip(*rows))))


def is_unit(table: pa.Table) -> None:
    """Vectors of MiniLM, which have length 1."""
    lengths = np.linalg.norm(np.array(table["embedding"].to_pylist()), axis=1)
    assert lengths == pytest.approx(np.ones(4), abs=1e-5)


def are_images(table: pa.Table) -> None:
    assert table.schema.field("pixels").type == pa.fixed_shape_tensor(pa.float32(), (3, 4, 4))
    pixels = table["pixels"].combine_chunks().to_numpy_ndarray()
    images = np.arange(3 * 48, dtype=np.uint8).reshape(3, 4, 4, 3)
    assert pixels == pytest.approx(images.transpose(0, 3, 1, 2) / 255)


Expected = Mapping[str, Any] | Callable[[pa.Table], None]
SCORES = {"id": [1, 2, 3], "scores": [[0.0, 3.0], [4.0, 7.0], [8.0, 11.0]]}
RESULTS: dict[tuple[str, str], dict[str, Expected]] = {
    ("ray-data", "Function over batches"): {
        "lengths": {
            "id": IDS,
            "text": TEXTS,
            "stars": [5, 1, 3, 4],
            "price": [10.0, 20.0, 5.0, 40.0],
            "length": [10, 17, 4, 24],
        }
    },
    ("ray-data", "Class with a model"): {"scores": SCORES},
    ("ray-data", "Batches as pandas frames"): {
        "discounts": {
            "id": IDS,
            "price": [10.0, 20.0, 5.0, 40.0],
            "discounted": [5.0, 10.0, 2.5, 20.0],
        }
    },
    ("ray-data", "Batches as Arrow tables"): {
        "upper": {"id": IDS, "upper": [text.upper() for text in TEXTS]}
    },
    ("ray-data", "Generator over batches"): {"words": {"id": IDS, "words": [2, 3, 1, 4]}},
    ("ray-data", "Function over rows"): {
        "short": {
            "id": IDS,
            "text": TEXTS,
            "short": ["Great", "Broke", "Fine", "Great"],
            "is_good": [True, False, False, True],
        }
    },
    ("ray-data", "Class over rows"): {
        "tags": {"id": IDS, "tag": ["praise", "complaint", "other", "praise"]}
    },
    ("ray-data", "One row to many"): {"words": columns("word_id id word stars", WORDS)},
    ("ray-data", "Filter"): {
        "long": {
            "id": [2, 4],
            "text": [TEXTS[1], TEXTS[3]],
            "stars": [1, 4],
            "price": [20.0, 40.0],
        }
    },
    ("ray-data", "Async class"): {
        "answers": {"id": IDS, "answer": [f"Hello {text}" for text in TEXTS]}
    },
    ("ray-data", "Images and tensors"): {"pixels": are_images},
    ("ray-data", "Constant arguments"): {
        "converted": {"id": IDS, "converted": [15.0, 30.0, 7.5, 60.0]}
    },
    ("ray-data", "Preprocessing before a model"): {"embedded": is_unit},
    ("ray-data", "Language model behind an API"): {
        "summaries": lambda table: same(
            table.select(["id", "summary"]).to_pydict(),
            {"id": IDS, "summary": [f"echo: Summarise: {text}" for text in TEXTS]},
        )
    },
    ("ray-data", "Embeddings"): {"embeddings": is_unit},
    ("ray-data", "Classification"): {
        "sentiments": lambda table: same(
            table["label"].to_pylist(), ["good", "bad", "bad", "good"]
        )
    },
    ("ray-data", "Errors"): {"halves": {"id": [1, 3, 4], "half": [2.5, 1.5, 2.0]}},
}


def same(actual: Any, expected: Any) -> None:
    """Assert that nested values are equal, numbers nearly so."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name in expected:
            same(actual[name], expected[name])
    elif isinstance(expected, list):
        assert len(actual) == len(expected), (actual, expected)
        for one, other in zip(actual, expected):
            same(one, other)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected)
    else:
        assert actual == expected


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the files that the pages read, as the current one; and a language model."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    with serving() as (_, url), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("OPENAI_BASE_URL", url)
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder


@pytest.fixture
def module(request: pytest.FixtureRequest, data: Path, tmp_path: Path) -> Iterator[ModuleType]:
    """The module of a snippet, whose functions travel by value as those of other tests."""
    snippet: Snippet = request.param
    name = re.sub(r"\W", "_", f"coming_from_{snippet.page}_{snippet.heading}".lower())
    write_module(snippet, tmp_path, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        loaded = importlib.import_module(name)
        cloudpickle.register_pickle_by_value(loaded)
        yield loaded
        cloudpickle.unregister_pickle_by_value(loaded)
        del sys.modules[name]


def named(snippet: Snippet) -> str:
    return f"{snippet.page}: {snippet.heading}"


def pipelines(module: ModuleType) -> list[vd.Pipeline]:
    """The pipelines of a module that have stages."""
    found = [each for each in vars(module).values() if isinstance(each, vd.Pipeline)]
    return [each for each in found if each.stages]


def test_every_snippet_has_a_result() -> None:
    sections = {(each.page, each.heading) for each in ALL}
    assert RESULTS.keys() | ON_ENGINES | DECLARED == sections


@pytest.mark.parametrize(
    "module",
    [each for each in ALL if (each.page, each.heading) in RESULTS],
    ids=named,
    indirect=True,
)
def test_our_side_of_a_snippet_runs(
    module: ModuleType,
    request: pytest.FixtureRequest,
    materialize: Run,
    local: vd.LocalCompute,
    tmp_path: Path,
) -> None:
    snippet: Snippet = request.node.callspec.params["module"]
    declared = pipelines(module)
    for pipeline in declared:
        assert materialize(pipeline, local).success
    for stage, expected in RESULTS[snippet.page, snippet.heading].items():
        owner = next(each for each in declared if stage in each.stages)
        table = read_stage(tmp_path / "store", owner.name, stage)
        if callable(expected):
            expected(table)
        else:
            same(table.to_pydict(), expected)


@pytest.mark.parametrize("snippet", ALL, ids=named)
def test_their_side_of_a_snippet_is_python(snippet: Snippet) -> None:
    ast.parse(snippet.theirs)


@pytest.mark.parametrize("page", PAGES)
def test_the_table_counts_the_changed_lines(page: str) -> None:
    found = {each.heading: each.changed_lines for each in snippets(page)}
    assert counted(page) == found
    assert max(lines or 0 for lines in found.values()) <= 2
