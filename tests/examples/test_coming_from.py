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
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.coming_from_data import TEXTS, write_data
from support.data import read_stage, write_source
from support.in_process import InProcessCompute
from support.llm_server import KEY, Server, serving
from support.results import Run
from support.snippets import (
    FOLDER,
    PAGES,
    block,
    imported,
    loaded,
    pipelines,
    refused,
    snippets,
    stage_of,
)
from support.warm_workers import workers_that_imported
from vane_dagster.pipeline.map_spec import MapBatchesSpec

ALL = {(page, each.heading): each for page in PAGES for each in snippets(page)}
ON_ENGINES = {key for key in ALL if key[1] == "Language model in vLLM"}
ON_SERVERS = {("spark", "Triton on the executors"), ("spark", "vLLM on the executors")}
ON_GPUS: dict[tuple[str, str], tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    ("ray-data", "Class with a model"): (
        "scores",
        {"GPU": 0.5, "CPU": 2.0},
        {'"cuda"': '"cpu"', "gpus=0.5": "gpus=0", "num_cpus=2)": "num_cpus=1)"},
    ),
    ("vane", "Class with a model"): (
        "embedded",
        {"GPU": 1.0, "CPU": 2.0},
        {'"cuda"': '"cpu"', "gpus=1.0": "gpus=0", "num_cpus=2.0)": "num_cpus=1)"},
    ),
}
"""Snippets that need a GPU: a stage, what it reserves, and what replaces the GPU in a run."""
MOST_CHANGED = {"ray-data": 0, "daft": 2, "spark": 2, "vane": 1}
"""The most lines of a function that change, as the beginning of each page says."""

IDS = [1, 2, 3, 4]
STARS = [5, 1, 3, 4]
VERDICT = {"is_good": True, "reason": "it shines"}
ASKED = [f"Is this good, with {n} stars? {text}" for text, n in zip(TEXTS, STARS)]
WORDS = [
    ("1-0", 1, "Great", 5), ("1-1", 1, "lamp", 5),
    ("2-0", 2, "Broken", 1), ("2-1", 2, "on", 1), ("2-2", 2, "arrival", 1),
    ("3-0", 3, "Fine", 3),
    ("4-0", 4, "Great", 4), ("4-1", 4, "chair,", 4), ("4-2", 4, "great", 4), ("4-3", 4, "price", 4),
]  # fmt: skip
"""Rows of the words: id, id of the text, word, stars."""
IMAGES = np.arange(3 * 48, dtype=np.uint8).reshape(3, 4, 4, 3)


def columns(names: str, rows: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return dict(zip(names.split(), map(list, zip(*rows))))


def are_vectors(table: pa.Table) -> None:
    """Vectors of MiniLM, which have length 1."""
    lengths = np.linalg.norm(np.array(table["embedding"].to_pylist()), axis=1)
    assert lengths == pytest.approx(np.ones(4), abs=1e-5)


def are_scores(table: pa.Table) -> None:
    same(table.to_pydict(), {"id": [1, 2, 3], "scores": [[0.0, 3.0], [4.0, 7.0], [8.0, 11.0]]})


def are_images(table: pa.Table) -> None:
    assert table.schema.field("pixels").type == pa.fixed_shape_tensor(pa.float32(), (3, 4, 4))
    pixels = table["pixels"].combine_chunks().to_numpy_ndarray()
    assert pixels == pytest.approx(IMAGES.transpose(0, 3, 1, 2) / 255)


def are_bright(table: pa.Table) -> None:
    assert table["brightness"].to_pylist() == pytest.approx(IMAGES.mean(axis=(1, 2, 3)))


def are_signatures(table: pa.Table) -> None:
    assert table["signature"].to_pylist() == [b"\x89PNG"] * 3


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
RESULTS: dict[tuple[str, str], dict[str, Expected]] = {
    ("ray-data", "Functions"): {
        "lengths": {
            "id": IDS,
            "text": TEXTS,
            "stars": STARS,
            "price": [10.0, 20.0, 5.0, 40.0],
            "length": [10, 17, 4, 24],
        },
        "counts": {"id": IDS, "words": [2, 3, 1, 4]},
        "short": {"id": IDS, "short": ["Great", "Broke", "Fine", "Great"]},
        "words": columns("word_id id word stars", WORDS),
    },
    ("ray-data", "Class with a model"): {"scores": are_scores},
    ("ray-data", "Images and files"): {"pixels": are_images},
    ("ray-data", "Language model behind an API"): {
        "summaries": answered(f"Summarise: {text}" for text in TEXTS)
    },
    ("ray-data", "Incremental runs and failed rows"): {
        "halves": {"id": [1, 3, 4], "half": [2.5, 1.5, 2.0]}
    },
    ("daft", "Functions"): {
        "cost": {"id": IDS, "cost": ["10.00 EUR", "20.00 EUR", "5.00 EUR", "40.00 EUR"]},
        "word": columns("word_id id stars word", [(a, b, d, c) for a, b, c, d in WORDS]),
        "total": {"id": IDS, "total": [50.0, 20.0, 15.0, 160.0]},
    },
    ("daft", "Class with a model"): {
        "embedding": are_vectors,
        "prefixed": {
            "id": IDS,
            "prefixed": [f"query: {text}" for text in TEXTS],
            "error": [None] * 4,
        },
    },
    ("daft", "Images and files"): {"pixels": are_images, "signature": are_signatures},
    ("daft", "Prompts"): {"verdict": are_verdicts},
    ("daft", "Incremental runs"): {"embedding": are_vectors},
    ("spark", "Batch inference"): {"scores": are_scores, "sentiment": are_sentiments},
    ("spark", "Images and files"): {"brightness": are_bright},
    ("spark", "Pandas UDFs"): {
        "first": {"id": IDS, "first": ["great lamp", "broken on arrival", "fine", "great chair"]},
        "good": {"id": [1, 4], "text": [TEXTS[0], TEXTS[3]]},
    },
    ("vane", "Functions"): {
        "lengths": {"id": IDS, "length": [10, 17, 4, 24]},
        "value": {"id": IDS, "value": [f"{text.upper()}!" for text in TEXTS]},
        "words": columns(
            "word_id id stars number word",
            [(at, id, stars, int(at[2:]), word) for at, id, word, stars in WORDS],
        ),
        "good": {
            "id": [1, 4],
            "upper": ["GREAT LAMP", "GREAT CHAIR, GREAT PRICE"],
            "doubled": [20.0, 80.0],
        },
    },
    ("vane", "Class with a model"): {"embedded": are_vectors},
    ("vane", "Expression functions and classes"): {
        "words": {"id": IDS, "words": [text.split() for text in TEXTS]},
        "clean": {"id": IDS, "clean": [text.lower() for text in TEXTS]},
        "p": {"id": IDS, "p": [f"p:{text}" for text in TEXTS]},
    },
    ("vane", "Images and files"): {"pixels": are_images},
    ("vane", "Prompts"): {"verdicts": are_verdicts},
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
        server.answers = {text: [json.dumps(VERDICT)] for text in (*TEXTS, *ASKED)}
        yield server


def of(keys: Iterable[tuple[str, str]]) -> Any:
    return pytest.mark.parametrize("key", keys, ids=": ".join)


def test_every_snippet_has_a_result() -> None:
    assert RESULTS.keys() | ON_ENGINES | ON_SERVERS == ALL.keys()


@of(RESULTS)
@pytest.mark.usefixtures("server")
def test_our_side_of_a_snippet_runs(
    key: tuple[str, str], materialize: Run, local: vd.LocalCompute, tmp_path: Path
) -> None:
    _, _, replaced = ON_GPUS.get(key, ("", {}, {}))
    with loaded(ALL[key], tmp_path, replaced) as module:
        for pipeline in pipelines(module):
            assert materialize(pipeline, local).success
        for stage, expected in RESULTS[key].items():
            pipeline = stage_of(module, stage).pipeline
            table = read_stage(tmp_path / "store", pipeline.name, stage)
            if callable(expected):
                expected(table)
            else:
                same(table.to_pydict(), expected)


@of(ON_GPUS)
@pytest.mark.usefixtures("server")
def test_our_side_of_a_snippet_reserves_gpus(key: tuple[str, str], tmp_path: Path) -> None:
    name, reserved, _ = ON_GPUS[key]
    with loaded(ALL[key], tmp_path) as module:
        spec = stage_of(module, name).spec
    assert isinstance(spec, MapBatchesSpec)
    assert spec.bundle == reserved


@pytest.mark.parametrize(
    ("page", "name", "value", "ours"), [(page, *each) for page in PAGES for each in refused(page)]
)
def test_an_argument_of_theirs_is_refused(
    page: str, name: str, value: str, ours: str, server: Server
) -> None:
    # Ray Data's strategies are objects of a class that starts nothing.
    given = eval(value, {"ray": importlib.import_module("ray.data") and sys.modules["ray"]})
    reviews = vd.Pipeline("reviews", source=vd.parquet("reviews.parquet"), id="id")
    with pytest.raises(vd.errors.DefinitionError, match=f"unknown argument {name!r}"):
        reviews.map_batches("m", len, schema={"n": "BIGINT"}, **{name: given})


def test_an_asset_on_dagster_ray_becomes_a_pipeline(tmp_path, monkeypatch):
    text = (FOLDER / "dagster-ray.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lengths.py").write_text(block(text, "A model in an asset"))
    write_source(tmp_path / "reviews/2026-01-02", {"id": [1, 2], "text": ["Fine", "Good"]})
    ours = block(text, "The same as a pipeline")
    with imported(ours, "from_dagster_ray", tmp_path, {"RayCompute": "LocalCompute"}) as module:
        assert module.defs.resolve_job_def("__ASSET_JOB")
        module.reviews.run("2026-01-02", store="store", compute=InProcessCompute())
    assert vd.load("reviews/published", store="store").to_pydict()["length"] == [4, 4]


@of(ALL)
def test_a_section_states_its_changed_lines(key: tuple[str, str]) -> None:
    changed = ALL[key].changed_lines
    assert ALL[key].counted == changed
    assert (changed or 0) <= MOST_CHANGED[key[0]]
