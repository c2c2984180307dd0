"""What a heartbeat says of a rank: the verb, how far it is, what it waits for."""

from __future__ import annotations

import threading
import time

import pytest

from backends import activity
from specs.wire.heartbeat import Activity


@pytest.fixture
def verb():
    activity.begin("generate", 7, counted=True)
    yield
    activity.end()


def read() -> Activity:
    now = activity.snapshot()
    assert now is not None
    return Activity.model_validate(now)


def test_counts_are_of_the_process_and_so_far_of_the_verb(verb: None) -> None:
    activity.count("token", 3)
    activity.describe("generate of 2 prompts, longest 8 tokens", "token", counted=True)
    before = read()
    activity.count("token", 4)
    activity.count("weight")
    after = read()
    assert (before.so_far, after.so_far) == (0, 4)
    assert after.counts["token"] - before.counts["token"] == 4
    assert after.words() == "generate of 2 prompts, longest 8 tokens, 4 tokens so far"
    assert (after.verb, after.call, after.counted) == ("generate", 7, True)
    activity.end()
    assert activity.snapshot() is None


def test_what_is_left_takes_as_long_as_what_was_done(verb: None) -> None:
    activity.describe("open_data", "row", counted=False)
    activity.count("row", 20)
    unknown = read()
    activity.expect(60)
    activity.expect(20)
    known = read().model_copy(update={"seconds": 5.0})
    assert (unknown.eta_s, known.eta_s) == (0.0, 15.0)
    assert known.model_copy(update={"so_far": 81}).eta_s == 0.0
    activity.begin("generate", 8, counted=True)
    assert read().of_all == 0


def test_samples_that_ranks_share_are_told_as_shared(verb: None) -> None:
    activity.describe("generate", "micro-batch", counted=True)
    activity.describe_samples(1, 1200)
    activity.count("micro-batch", 2)
    alone = read()
    activity.describe_samples(5, 6000, ranks=4)
    shared = read()
    assert alone.words() == "generate of 1 sample, 1,200 tokens, 2 micro-batches so far"
    assert shared.words() == "generate of 5 samples, 6,000 tokens, shared by 4 ranks, 2 micro-batches so far"
    activity.end()
    activity.describe_samples(1, 1)
    assert activity.snapshot() is None


def test_another_thread_reads_where_the_main_one_is(verb: None) -> None:
    found: list[Activity] = []
    looked = threading.Lock()

    def look() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:  # the main thread is still in Python's `start`, or on its way from there
            now = read()
            if now.where.startswith("test_another_thread_reads"):
                break
            time.sleep(0.01)
        found.append(now)
        looked.release()

    thread = threading.Thread(target=look)
    looked.acquire()
    with activity.waiting_for("rollout 0"):
        thread.start()
        looked.acquire()  # of a lock: that has no frame of Python's
    thread.join()
    assert found[0].waits_for == "rollout 0"
    assert found[0].where.startswith("test_another_thread_reads")
    assert read().waits_for == ""
