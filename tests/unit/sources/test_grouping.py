"""Groups of small files: complete, within their limits, and not moved by an added file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vane_dagster.sources.base import FragmentRule
from vane_dagster.sources.grouping import SizedFile, group, is_cut
from vane_dagster.storage.manifest import FileRecord

ROWS, BYTES = 100, 10_000
RULE = FragmentRule(ROWS, BYTES)


def sized(url: str, rows: int, size: int) -> SizedFile:
    return SizedFile(FileRecord(url, size, "1"), [(rows, size)])


SIZES = st.builds(
    sized,
    st.integers(0, 5_000).map(lambda n: f"file:///src/{n:05d}.parquet"),
    st.integers(1, 12),
    st.integers(1, 1_250),
)
LISTINGS = st.lists(SIZES, max_size=200, unique_by=lambda file: file.record.url)


def grouped(files: list[SizedFile]) -> list[list[SizedFile]]:
    return list(group(files, RULE))


@given(LISTINGS)
def test_each_file_is_in_one_group_within_the_limits(files):
    groups = grouped(files)
    assert [file for each in groups for file in each] == sorted(files, key=lambda f: f.record.url)
    for each in groups:
        assert sum(file.rows for file in each) <= ROWS
        assert sum(file.bytes for file in each) <= BYTES


@given(LISTINGS, SIZES)
def test_an_added_file_changes_groups_between_its_neighbouring_cuts_only(files, added):
    files = [file for file in files if file.record.url != added.record.url]
    cuts = [file.record.url for file in files if is_cut(file, RULE)]
    low = max((url for url in cuts if url < added.record.url), default="")
    high = min((url for url in cuts if url > added.record.url), default="~")
    before, after = grouped(files), grouped([*files, added])

    def outside(groups: list[list[SizedFile]]) -> list[list[SizedFile]]:
        return [each for each in groups if each[-1].record.url <= low or each[0].record.url > high]

    assert outside(before) == outside(after)
    # Groups of the same segment that end before the added file's are packed as they were, and the
    # last of them may have had files behind the added one.
    (own,) = [each for each in after if added in each]
    *earlier, last = [[], *(each for each in after if each[-1].record.url < own[0].record.url)]
    assert all(each in before for each in earlier if each)
    assert not last or any(each[: len(last)] == last for each in before)
    if is_cut(added, RULE):
        assert own[-1] == added
        assert not any(e[0].record.url < added.record.url < e[-1].record.url for e in after)


def test_groups_reach_the_target_on_average():
    files = [sized(f"file:///{n}", 1, 1) for n in range(5_000)]
    groups = grouped(files)
    assert 0.4 * ROWS < len(files) / len(groups) <= ROWS
