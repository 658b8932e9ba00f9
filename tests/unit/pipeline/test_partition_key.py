"""What placeholders stand for in a partition."""

from __future__ import annotations

import pickle

import dagster as dg
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import write_source
from vane_dagster._arguments import any_partition, fill_placeholders, filled_filter
from vane_dagster.errors import SourceError
from vane_dagster.pipeline.partition_key import PartitionKey

LANGUAGES = dg.StaticPartitionsDefinition(["de", "o'k"])
HOURS = dg.HourlyPartitionsDefinition("2026-01-01-00:00")
BERLIN = dg.DailyPartitionsDefinition("2026-03-28", timezone="Europe/Berlin")
BOTH = dg.MultiPartitionsDefinition({"language": LANGUAGES, "day": BERLIN})


@pytest.mark.parametrize(
    ("partitions_def", "key", "text", "filled"),
    [
        (LANGUAGES, "o'k", "l = '{partition_key}'", "l = 'o''k'"),
        (HOURS, "2026-01-01-23:00", "{partition_start:%Y/%m/%d.%H}", "2026/01/01.23"),
        (HOURS, "2026-01-01-23:00", "t < '{partition_end}'", "t < '2026-01-02T00:00:00+00:00'"),
        (BERLIN, "2026-03-29", "{partition_start}", "2026-03-29T00:00:00+01:00"),
        (BERLIN, "2026-03-29", "{partition_end}", "2026-03-30T00:00:00+02:00"),
        (BOTH, "2026-03-29|de", "{partition_key.language}/{partition_end:%d}", "de/30"),
        (dg.WeeklyPartitionsDefinition("2026-01-04"), "2026-01-04", "{partition_end:%d}", "11"),
    ],
)
def test_placeholders_name_the_key_its_dimensions_and_its_time_window(
    partitions_def, key, text, filled
):
    assert filled_filter(text, PartitionKey(key, partitions_def)) == filled


@pytest.mark.parametrize(
    ("url", "pattern"),
    [
        ("a/{partition_key}/**/*.wav", "a/*/**/*.wav"),
        ("a/{partition_start:%Y/%m}/x{partition_key}*.csv", "a/*/*/x*.csv"),
        ("a/{partition_start:%Y}{partition_start:%m%d}.parquet", "a/*.parquet"),
    ],
)
def test_the_files_of_all_partitions_match_a_glob(url, pattern):
    assert any_partition(url) == pattern


def test_a_key_of_other_partitions_has_no_bounds():
    with pytest.raises(SourceError, match="'old' is no key of the pipeline's time windows"):
        fill_placeholders("{partition_start}", PartitionKey("old", HOURS))


def test_other_processes_get_the_text():
    sent = pickle.loads(pickle.dumps(PartitionKey("2026-03-29|de", BOTH)))
    assert (type(sent), sent) == (str, "2026-03-29|de")
    assert fill_placeholders("{partition_key}", sent) == "2026-03-29|de"


def test_a_source_reads_the_folders_of_a_time_window(tmp_path):
    for hour in ("00", "01"):
        folder = tmp_path / "year=2026/01/01" / hour
        write_source(folder, {"id": [int(hour)]}, "a.parquet")
    source = vd.parquet(f"{tmp_path}/year={{partition_start:%Y/%m/%d}}/{{partition_start:%H}}/")
    docs = vd.Pipeline("docs", source=source, id="id", partitions_def=HOURS)
    assert docs.source_schema() == pa.schema([("id", pa.int64())])
    key = docs._partition("2026-01-01-01:00")
    (file,) = docs.source.required(docs.source.list_files([key], "docs")[key], key, "docs")
    assert file.url.endswith("year=2026/01/01/01/a.parquet")
