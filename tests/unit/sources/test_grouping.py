"""Groups of small files: complete, within their limits, and not moved by an added file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vane_dagster.sources.grouping import MOST_FILES, FileSize, group, is_cut, is_small

ROWS, BYTES = 100, 10_000
SIZES = st.builds(
    FileSize,
    st.integers(0, 5_000).map(lambda n: f"file:///src/{n:05d}.parquet"),
    st.integers(1, 12),
    st.integers(1, 1_250),
)
LISTINGS = st.lists(SIZES, max_size=200, unique_by=lambda file: file.url)


def grouped(files: list[FileSize]) -> list[list[FileSize]]:
    return list(group(files, ROWS, BYTES))


@given(LISTINGS)
def test_each_file_is_in_one_group_within_the_limits(files):
    groups = grouped(files)
    assert [file for each in groups for file in each] == sorted(files, key=lambda f: f.url)
    for each in groups:
        assert sum(file.rows for file in each) <= ROWS
        assert sum(file.bytes for file in each) <= BYTES


@given(LISTINGS)
def test_the_order_of_the_listing_does_not_matter(files):
    assert grouped(files) == grouped(files[::-1])


@given(LISTINGS, SIZES)
def test_an_added_file_changes_groups_between_its_neighbouring_cuts_only(files, added):
    files = [file for file in files if file.url != added.url]
    cuts = [file.url for file in files if is_cut(file, ROWS, BYTES)]
    low = max((url for url in cuts if url < added.url), default="")
    high = min((url for url in cuts if url > added.url), default="~")
    before, after = grouped(files), grouped([*files, added])

    def outside(groups: list[list[FileSize]]) -> list[list[FileSize]]:
        return [each for each in groups if each[-1].url <= low or each[0].url > high]

    assert outside(before) == outside(after)
    # Groups of the same segment that end before the added file's are packed as they were, and the
    # last of them may have had files behind the added one.
    (own,) = [each for each in after if added in each]
    *earlier, last = [[], *(each for each in after if each[-1].url < own[0].url)]
    assert all(each in before for each in earlier if each)
    assert not last or any(each[: len(last)] == last for each in before)
    if is_cut(added, ROWS, BYTES):
        assert own[-1] == added
        assert not any(e[0].url < added.url < e[-1].url for e in after)


def test_groups_reach_the_target_on_average():
    files = [FileSize(f"file:///{n}", 1, 1) for n in range(20_000)]
    groups = grouped(files)
    assert 0.4 * ROWS < len(files) / len(groups) <= ROWS


def test_tiny_files_are_grouped_by_number():
    files = [FileSize(f"file:///{n}", 1, 1) for n in range(10_000)]
    sizes = [len(each) for each in group(files, 1 << 40, 1 << 60)]
    assert max(sizes) <= MOST_FILES
    assert sum(sizes) / len(sizes) > MOST_FILES / 3


def test_small_is_an_eighth_of_a_fragment():
    assert is_small(FileSize("a", 12, 1_250), 100, 10_000)
    assert not is_small(FileSize("a", 13, 1), 100, 10_000)
    assert not is_small(FileSize("a", 1, 1_251), 100, 10_000)
