"""Lists and errors as text."""

from __future__ import annotations

from vane_dagster._texts import EqualErrors


def test_errors_that_differ_in_the_partition_and_in_numbers_are_one():
    errors = EqualErrors()
    keys = ["mon", "tue", "wed", "thu"]
    new = [errors.add(k, f"'/in/{k}/f{n}': row {n} of monday") for n, k in enumerate(keys)]
    assert new == [True, False, False, False]
    digests = ["/9fe0", "/b07c55d", "/4d"]
    assert [errors.add(k, f"gone: {each}") for k, each in zip(keys, digests)] == [True, False, False]
    assert errors.add("fri", "'/in/fri': no rows")
    assert errors.add("fri", "'/in/fri': no rows", "another stage")
    assert not errors.add("fri", "'/in/fri': no rows")
    assert errors.texts() == [
        "4 partitions (mon, tue, wed and 1 more): '/in/mon/f0': row 0 of monday",
        "3 partitions (mon, tue, wed): gone: /9fe0",
        "'/in/fri': no rows",
        "'/in/fri': no rows",
    ]
    assert len(errors) == 4


def test_errors_without_partitions_are_equal_only_if_their_text_is():
    errors = EqualErrors()
    assert [errors.add(None, f"stage 'm{n}': no") for n in (1, 2, 2)] == [True, True, False]
    assert errors.texts() == ["stage 'm1': no", "stage 'm2': no"]
