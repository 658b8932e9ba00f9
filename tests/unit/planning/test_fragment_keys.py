"""Keys of a stage's fragments: across generations, and with failed rows to retry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vane_dagster.fingerprint.hashing import digest
from vane_dagster.planning.fragment_keys import fragment_keys, has_faults
from vane_dagster.storage.manifest import PartInfo

ABOVE = (("u0", "u1"),)


def manifest(*parts: PartInfo) -> Any:
    return SimpleNamespace(parts=list(parts))


def part(key: str, faults: str = "") -> PartInfo:
    return PartInfo(key, "d", 1, 1, faults=faults)


def keys(generation: int = 0, former: Any = None, retry: bool = False) -> tuple[str, ...]:
    return fragment_keys("new", generation, ABOVE, former, retry)


def test_a_key_depends_on_definition_generation_and_every_upstream_key():
    known = {
        fragment_keys(definition, generation, [[first], [second]], None, False)
        for definition in ("new", "old")
        for generation in (0, 1)
        for first in ("a", "b")
        for second in ("a", "b")
    }
    assert len(known) == 16


def test_a_fragment_keeps_the_part_of_the_latest_generation():
    parts = [part(digest("new", made_in, "u0")) for made_in in (0, 2)]
    first, second = keys(3, manifest(*parts))
    assert first == digest("new", 2, "u0")
    assert second == digest("new", 3, "u1"), "it has no part"


def test_a_part_of_a_later_generation_is_not_kept():
    later = manifest(part(digest("new", 2, "u0")))
    assert keys(1, later)[0] == digest("new", 1, "u0")


def test_only_fragments_with_failed_rows_are_retried():
    failed, fine = part(digest("new", 0, "u0"), "f.parquet"), part(digest("new", 0, "u1"))
    found = keys(1, manifest(failed, fine), retry=True)
    assert found == (digest("new", 1, "u0"), fine.key)
    assert keys(1, manifest(failed, fine)) == (failed.key, fine.key), "unless that is asked for"


def test_failed_rows_are_not_retried_within_their_generation():
    failed = part(digest("new", 1, "u0"), "f.parquet")
    assert keys(1, manifest(failed), retry=True)[0] == failed.key


def test_a_partition_has_faults_if_one_of_its_parts_has():
    assert has_faults(manifest(part("a"), part("b", "f.parquet")))
    assert not has_faults(manifest(part("a")))


def test_a_patch_changes_the_keys_of_fragments_that_may_have_its_rows():
    without = fragment_keys("new", 0, ABOVE, None, False)
    first, second = fragment_keys("new", 0, ABOVE, None, False, [["patched-s-1.json"], []])
    assert (first, second) == (digest("new", 0, "u0", "patched-s-1.json"), without[1])
    both = fragment_keys("new", 0, ABOVE, None, False, [["patched-s-1.json", "x"], []])
    assert len({first, both[0], without[0]}) == 3
    part_of_former = manifest(part(first))
    raised = fragment_keys("new", 1, ABOVE, part_of_former, True, [["patched-s-1.json"], []])
    assert raised[0] == first, "a retry keeps it"
