"""The examples of docs/sources.md, as a reader would run them."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import vane_dagster as vd
from support.data import read_stage

PAGE = Path(vd.__file__).parents[1] / "docs" / "sources.md"


def example(heading: str, folder: Path, replaced: Mapping[str, str] | None = None) -> ModuleType:
    """The first block of Python below a heading, imported from a file.

    Args:
        heading: The heading.
        folder: The folder of the file.
        replaced: Texts to replace, such as addresses that only a reader has.
    """
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
    return module


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
    assert isinstance(module.defs, dg.Definitions)
    assert materialize(module.photos, local).success
    found = read_stage(tmp_path / "store", "photos", "bright")
    assert found["brightness"].to_pylist() == [pytest.approx(20, abs=2)]


def test_rows_in_memory(tmp_path, local, materialize):
    module = example("Rows in memory", tmp_path)
    assert isinstance(module.defs, dg.Definitions)
    assert materialize(module.faq, local).success
    assert read_stage(tmp_path / "store", "faq", "lengths")["length"].to_pylist() == [4, 4, 5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # it warns of its own settings
def test_ray_datasets(tmp_path, cluster, ray_data, materialize):
    module = example("Ray Datasets", tmp_path)
    assert isinstance(module.defs, dg.Definitions)
    assert materialize(module.numbers, vd.RayCompute(cluster=cluster)).success
    halves = read_stage(tmp_path / "store", "numbers", "halves")
    assert sorted(halves["half"].to_pylist()) == [n * n / 2 for n in range(1_000)]


def test_hugging_face_datasets(tmp_path, local, materialize):
    rows = pa.table({"id": ["a", "b"], "question": ["Who was it?", "Why?"]})
    (tmp_path / "squad").mkdir()
    pq.write_table(rows, tmp_path / "squad" / "validation.parquet")
    hub = ('"rajpurkar/squad"', f'"{tmp_path}/squad", cache_dir="{tmp_path}/cache"')
    module = example("Hugging Face datasets", tmp_path, dict([hub]))
    assert isinstance(module.defs, dg.Definitions)
    assert materialize(module.squad, local).success
    found = read_stage(tmp_path / "store", "squad", "lengths")
    assert found["words"].to_pylist() == [3, 1]
