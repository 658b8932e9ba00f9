"""When a server is restarted, and when it is given up."""

from __future__ import annotations

from vane_dagster.servers.restart_policy import RestartPolicy, SupervisionLimits


def policy(**limits):
    return RestartPolicy(SupervisionLimits(**limits))


def test_a_third_failed_start_in_a_row_is_the_last():
    rules = policy()
    assert [rules.after_failed_start() for _ in range(3)] == [1.0, 2.0, None]
    assert rules.exhausted == "3 starts in a row failed"


def test_a_success_ends_the_row_of_failed_starts():
    rules = policy()
    for _ in range(2):
        rules.after_failed_start()
    rules.record_ready()
    assert rules.after_failed_start() == 1.0
    assert rules.exhausted == ""


def test_the_fifth_crash_is_the_last():
    rules = policy(max_crashes=5)
    waits = []
    for _ in range(5):
        rules.record_ready()
        waits.append(rules.after_crash(1.0))
    assert waits == [1.0, 2.0, 4.0, 8.0, None]
    assert rules.exhausted == "5 crashes without 10 minutes of uptime between them"


def test_crashes_before_ten_minutes_of_uptime_do_not_count():
    rules = policy()
    for _ in range(20):
        assert all(rules.after_crash(599.0) is not None for _ in range(3))
        assert rules.after_crash(600.0) == 1.0
    assert rules.exhausted == ""


def test_the_wait_doubles_up_to_its_maximum_over_crashes_and_failed_starts():
    rules = policy(max_failed_starts=9, max_crashes=9)
    rules.record_ready()
    waits = [rules.after_crash(1.0), *(rules.after_failed_start() for _ in range(6))]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
