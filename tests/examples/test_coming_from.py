"""The pages for users of other systems: our side of each snippet runs, and its changes are counted.

The snippets with an engine are in `tests/providers/test_coming_from_engines.py`, those with servers
in `tests/providers/test_spark_guides.py`.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.coming_from_data import write_data
from support.data import read_stage
from support.llm_server import KEY, Server, serving
from support.results import Run
from support.snippets import PAGES, Snippet, counted, loaded, pipelines, refused, snippets, stage_of
from support.warm_workers import workers_that_imported
from vane_dagster.pipeline.map_spec import MapBatchesSpec

ALL = [snippet for page in PAGES for snippet in snippets(page)]
ON_ENGINES = {(page, "Language model in vLLM") for page in PAGES}
ON_SERVERS = {("spark", "Triton on the executors"), ("spark", "vLLM on the executors")}
ON_GPUS: dict[tuple[str, str], Mapping[str, Any]] = {
    ("daft", "GPUs, processes, retries"): {"score": {"GPU": 0.5}},
    ("ray-data", "GPUs and concurrency"): {"scores": {"GPU": 0.5, "CPU": 2.0}},
    ("vane", "GPUs, actors and backends"): {"scores": {"GPU": 1.0, "CPU": 2.0}},
}
"""Snippets that need a GPU: what their stages reserve. Only the declaration is tested."""
LONGER = {("spark", "Iterator of series, with a model")}
"""Snippets with more than two changed lines: a loop over batches becomes a function of one."""

IDS = [1, 2, 3, 4]
TEXTS = ["Great lamp", "Broken on arrival", "Fine", "Great chair, great price"]
STARS = [5, 1, 3, 4]
FIRST = ["Great", "Broken", "Fine", "Great"]
LONG = {"id": [2, 4], "text": [TEXTS[1], TEXTS[3]], "stars": [1, 4], "price": [20.0, 40.0]}
SUMS = {"id": IDS, "score": [15.0, 21.0, 8.0, 44.0]}
VERDICT = {"is_good": True, "reason": "it shines"}
WORDS = [
    ("1-0", 1, "Great", 5), ("1-1", 1, "lamp", 5),
    ("2-0", 2, "Broken", 1), ("2-1", 2, "on", 1), ("2-2", 2, "arrival", 1),
    ("3-0", 3, "Fine", 3),
    ("4-0", 4, "Great", 4), ("4-1", 4, "chair,", 4), ("4-2", 4, "great", 4), ("4-3", 4, "price", 4),
]  # fmt: skip
"""Rows of the words: id, id of the text, word, stars."""


def columns(names: str, rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return dict(zip(names.split(), map(list, zip(*rows))))


def are_vectors(table: pa.Table) -> None:
    """Vectors of MiniLM, which have length 1."""
    lengths = np.linalg.norm(np.array(table["embedding"].to_pylist()), axis=1)
    assert lengths == pytest.approx(np.ones(4), abs=1e-5)


def are_images(table: pa.Table) -> None:
    assert table.schema.field("pixels").type == pa.fixed_shape_tensor(pa.float32(), (3, 4, 4))
    pixels = table["pixels"].combine_chunks().to_numpy_ndarray()
    images = np.arange(3 * 48, dtype=np.uint8).reshape(3, 4, 4, 3)
    assert pixels == pytest.approx(images.transpose(0, 3, 1, 2) / 255)


def are_sentiments(table: pa.Table) -> None:
    assert table["label"].to_pylist() == ["good", "bad", "bad", "good"]


def are_verdicts(table: pa.Table) -> None:
    assert table["verdict"].to_pylist() == [VERDICT] * 4


def answered(prompts: Iterable[str]) -> Callable[[pa.Table], None]:
    """Check the answers of the server, which repeats prompts, in any column."""
    expected = [f"echo: {prompt}" for prompt in prompts]

    def check(table: pa.Table) -> None:
        answers = [table[name].to_pylist() for name in table.column_names]
        assert expected in answers

    return check


Expected = Mapping[str, Any] | Callable[[pa.Table], None]
SCORES = {"id": [1, 2, 3], "scores": [[0.0, 3.0], [4.0, 7.0], [8.0, 11.0]]}
RESULTS: dict[tuple[str, str], dict[str, Expected]] = {
    ("ray-data", "Function over batches"): {
        "lengths": {
            "id": IDS,
            "text": TEXTS,
            "stars": STARS,
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
    ("ray-data", "Filter"): {"long": LONG},
    ("ray-data", "Async class"): {
        "answers": {"id": IDS, "answer": [f"Hello {text}" for text in TEXTS]}
    },
    ("ray-data", "Images and tensors"): {"pixels": are_images},
    ("ray-data", "Constant arguments"): {
        "converted": {"id": IDS, "converted": [15.0, 30.0, 7.5, 60.0]}
    },
    ("ray-data", "Preprocessing before a model"): {"embedded": are_vectors},
    ("ray-data", "Language model behind an API"): {
        "summaries": answered(f"Summarise: {text}" for text in TEXTS)
    },
    ("ray-data", "Embeddings"): {"embedding": are_vectors},
    ("ray-data", "Classification"): {"label": are_sentiments},
    ("ray-data", "Errors"): {"halves": {"id": [1, 3, 4], "half": [2.5, 1.5, 2.0]}},
    ("daft", "Function over rows"): {
        "description": {
            "id": IDS,
            "description": [f"{text}: {n} of 5" for text, n in zip(TEXTS, STARS)],
        }
    },
    ("daft", "Other columns, literals and defaults"): {
        "cost": {"id": IDS, "cost": ["10.00 EUR", "20.00 EUR", "5.00 EUR", "40.00 EUR"]}
    },
    ("daft", "Lists, and a declared type"): {
        "lengths": {"id": IDS, "lengths": [[5, 4], [6, 2, 7], [4], [5, 6, 5, 5]]},
        "ratio": {"id": IDS, "ratio": [1.0, 0.2, 0.6, 0.8]},
    },
    ("daft", "Structs"): {
        "analysis": {"id": IDS, "words": [2, 3, 1, 4], "first": FIRST},
    },
    ("daft", "Async function"): {
        "fetched": {"id": IDS, "fetched": [text.upper() for text in TEXTS]}
    },
    ("daft", "Generator"): {
        "word": columns("word_id id stars word", [(a, b, d, c) for a, b, c, d in WORDS])
    },
    ("daft", "Batch function"): {"total": {"id": IDS, "total": [50.0, 20.0, 15.0, 160.0]}},
    ("daft", "Class"): {"tag": {"id": IDS, "tag": ["praise", "none", "none", "praise"]}},
    ("daft", "Methods of one class"): {
        "prefixed": {"id": IDS, "prefixed": [f">> {text}" for text in TEXTS]},
        "words": {"id": IDS, "words": [text.split() for text in TEXTS]},
    },
    ("daft", "Two instances"): {
        "price_norm": {"id": IDS, "price_norm": [0.0, 2.0, -1.0, 6.0]},
        "stars_norm": {"id": IDS, "stars_norm": [1.0, -1.0, 0.0, 0.5]},
    },
    ("daft", "Async and generator methods"): {
        "answer": {"id": IDS, "answer": [f"Hello {text}" for text in TEXTS]},
        "letter": columns(
            "letter_id id letter",
            [(f"{id}-{n}", id, text[n]) for id, text in zip(IDS, TEXTS) for n in (0, 1)],
        ),
    },
    ("daft", "Batch method with a model"): {"embedding": are_vectors},
    ("daft", "Filter by a function"): {"long": LONG},
    ("daft", "Images"): {"pixels": are_images},
    ("daft", "Prompts"): {
        "answers": answered(f"Summarise in {n} words: {text}" for text, n in zip(TEXTS, STARS))
    },
    ("daft", "Structured answers"): {"verdicts": are_verdicts},
    ("daft", "Embeddings"): {"embedding": are_vectors},
    ("daft", "Classification"): {"label": are_sentiments},
    ("daft", "Writing results"): {"upper": {"id": IDS, "upper": [text.upper() for text in TEXTS]}},
    ("spark", "One column"): {"discounted": {"id": IDS, "discounted": [5.0, 10.0, 2.5, 20.0]}},
    ("spark", "Several columns"): {"total": {"id": IDS, "total": [50.0, 20.0, 15.0, 160.0]}},
    ("spark", "Several columns as one tensor"): {
        "preds": {"id": IDS, "preds": [60.0, 30.0, 35.0, 80.0]}
    },
    ("spark", "Tensor column"): {"scores": SCORES},
    ("spark", "Some inputs are tensors"): {
        "distance": {"id": [1, 2, 3], "distance": [7.0, 24.0, 41.0]}
    },
    ("spark", "Many inputs of a Keras model"): {"score": SUMS},
    ("spark", "Dict of arrays"): {
        "stats": {
            "id": [1, 2, 3],
            "total": [6.0, 22.0, 38.0],
            "doubled": [[0.0, 2.0, 4.0, 6.0], [8.0, 10.0, 12.0, 14.0], [16.0, 18.0, 20.0, 22.0]],
        }
    },
    ("spark", "List of dicts, from a Hugging Face pipeline"): {"sentiment": are_sentiments},
    ("spark", "Sentence embeddings"): {"embedding": are_vectors},
    ("spark", "Generated text"): {
        "reversed": {"id": IDS, "reversed": [text[::-1] for text in TEXTS]}
    },
    ("spark", "A server beside the executors"): {"answer": answered(TEXTS)},
    ("spark", "Pandas UDF"): {
        "first": {"id": IDS, "first": ["great lamp", "broken on arrival", "fine", "great chair"]}
    },
    ("spark", "Iterator of series, with a model"): {
        "predicted": {"id": IDS, "predicted": [5.0, 10.0, 2.5, 20.0]}
    },
    ("spark", "mapInPandas"): {"good": {"id": [1, 4], "text": [TEXTS[0], TEXTS[3]]}},
    ("spark", "scikit-learn"): {"score": SUMS},
    ("vane", "Function over batches"): {"lengths": {"id": IDS, "length": [10, 17, 4, 24]}},
    ("vane", "Class with a model"): {"embedded": are_vectors},
    ("vane", "Function over values"): {
        "value": {"id": IDS, "value": [f"{text.upper()}!" for text in TEXTS]}
    },
    ("vane", "One row to many"): {
        "words": columns(
            "word_id id stars number word",
            [(at, id, stars, int(at[2:]), word) for at, id, word, stars in WORDS],
        )
    },
    ("vane", "SQL"): {
        "good": {
            "id": [1, 4],
            "upper": ["GREAT LAMP", "GREAT CHAIR, GREAT PRICE"],
            "doubled": [20.0, 80.0],
        }
    },
    ("vane", "Tensors"): {"pixels": are_images},
    ("vane", "Expression function"): {
        "words": {"id": IDS, "words": [text.split() for text in TEXTS]}
    },
    ("vane", "Expression class"): {
        "prefixed": {"id": IDS, "prefixed": [f"p:{text}" for text in TEXTS]}
    },
    ("vane", "Expression over batches"): {
        "clean": {"id": IDS, "clean": [text.lower() for text in TEXTS]}
    },
    ("vane", "Prompts"): {"answers": answered(TEXTS)},
    ("vane", "Structured answers"): {"verdicts": are_verdicts},
    ("vane", "Embeddings"): {"embedding": are_vectors},
    ("vane", "Classification"): {"label": are_sentiments},
    ("vane", "Writing results"): {
        "good": {"id": [1, 4], "text": [TEXTS[0], TEXTS[3]], "stars": [5, 4]}
    },
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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A language model, and the files that the pages read in the current folder."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    libraries = ("sentence_transformers", "transformers.models.bert.modeling_bert")
    with (
        serving() as (server, url),
        pytest.MonkeyPatch.context() as patch,
        workers_that_imported(*libraries),
    ):
        patch.chdir(folder)
        patch.setenv("OPENAI_BASE_URL", url)
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield server


@pytest.fixture
def module(
    request: pytest.FixtureRequest, server: Server, tmp_path: Path
) -> Iterator[tuple[Snippet, ModuleType]]:
    """A snippet, and our side of it as a module."""
    snippet: Snippet = request.param
    structured = snippet.heading == "Structured answers"
    server.answers = {text: [json.dumps(VERDICT)] for text in TEXTS} if structured else {}
    with loaded(snippet, tmp_path) as found:
        yield snippet, found


def named(snippet: Snippet) -> str:
    return f"{snippet.page}: {snippet.heading}"


def of(results: Mapping[tuple[str, str], Any]) -> Any:
    """A parameter for each snippet that has a result; one for those that are equal."""
    chosen = {each.ours: each for each in ALL if (each.page, each.heading) in results}
    return pytest.mark.parametrize("module", chosen.values(), ids=named, indirect=True)


def test_every_snippet_has_a_result() -> None:
    sections = {(each.page, each.heading) for each in ALL}
    assert RESULTS.keys() | ON_ENGINES | ON_SERVERS | ON_GPUS.keys() == sections


@of(RESULTS)
def test_our_side_of_a_snippet_runs(
    module: tuple[Snippet, ModuleType], materialize: Run, local: vd.LocalCompute, tmp_path: Path
) -> None:
    snippet, found = module
    for pipeline in pipelines(found):
        assert materialize(pipeline, local).success
    for stage, expected in RESULTS[snippet.page, snippet.heading].items():
        table = read_stage(tmp_path / "store", stage_of(found, stage).pipeline.name, stage)
        if callable(expected):
            expected(table)
        else:
            same(table.to_pydict(), expected)


@of(ON_GPUS)
def test_our_side_of_a_snippet_reserves_gpus(module: tuple[Snippet, ModuleType]) -> None:
    snippet, found = module
    for name, reserved in ON_GPUS[snippet.page, snippet.heading].items():
        spec = stage_of(found, name).spec
        assert isinstance(spec, MapBatchesSpec)
        assert spec.bundle == reserved


@pytest.mark.parametrize(
    ("page", "name", "value", "ours"), [(page, *each) for page in PAGES for each in refused(page)]
)
def test_an_argument_of_theirs_is_refused_with_ours(
    page: str, name: str, value: str, ours: str, server: Server
) -> None:
    # Ray Data's strategies are objects of a class that starts nothing.
    given = eval(value, {"ray": importlib.import_module("ray.data") and sys.modules["ray"]})
    reviews = vd.Pipeline("reviews", source=vd.parquet("reviews.parquet"), id="id")
    with pytest.raises(vd.errors.DefinitionError) as raised:
        reviews.map_batches("m", len, schema={"n": "BIGINT"}, **{name: given})
    assert name in str(raised.value)
    assert ours in str(raised.value)


@pytest.mark.parametrize("page", PAGES)
def test_the_table_counts_the_changed_lines(page: str) -> None:
    found = {each.heading: each.changed_lines for each in snippets(page)}
    assert counted(page) == found
    longer = {heading for heading, lines in found.items() if lines is not None and lines > 2}
    assert longer == {heading for at, heading in LONGER if at == page}
