"""The transport `group` between hosts: the weights go to each host once, and its readers share what arrived."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from some_hosts import Hosts, some_hosts

from backends.weights.checksum import checksum_bytes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
BUCKETS, NBYTES, SMALL = 3, 16 * 2**20, 2**20


class Script:
    """A script of tests/support, on one of the hosts or here."""

    def __init__(self, host: str, name: str, *words: object) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "tests" / "support" / name), *map(str, words)]
        within = ["ip", "netns", "exec", host] if host else []
        self.process = subprocess.Popen(
            [*within, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def say(self, told: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(told), file=self.process.stdin, flush=True)

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=90)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with some_hosts() as made:
        yield made


def sent_bytes(host: str) -> int:
    """That have left a host through its cable."""
    command = ["ip", "-n", host, "-s", "-j", "link", "show", "cable"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


def test_sixty_four_readers_of_a_host_cost_one_copy(hosts: Hosts) -> None:
    writer = Script(hosts.here, "far_writer.py", hosts.address, BUCKETS, NBYTES, [[*range(64)]])
    readers = Script(hosts.there, "far_readers.py", 0, 64)
    try:
        readers.say(json.loads(writer.hear()))
        assert readers.hear() == '"ready"'
        before = sent_bytes(hosts.here)
        for bucket in range(BUCKETS):
            writer.say("next")
            readers.say(bucket)
            content_U = np.random.default_rng(bucket).integers(0, 256, NBYTES, dtype=np.uint8)
            assert json.loads(readers.hear()) == [checksum_bytes(content_U)]
        assert writer.hear() == "sent"
        sent = sent_bytes(hosts.here) - before
        assert BUCKETS * NBYTES < sent <= 1.1 * BUCKETS * NBYTES
    finally:
        writer.end()
        readers.end()


@pytest.mark.usefixtures("warm_children")
def test_a_reader_that_dies_stops_those_alone_that_need_it() -> None:
    """A follower's death stops nobody; of a leader's its followers, and the actor, learn at once."""
    writer = Script("", "far_writer.py", "127.0.0.1", 40, SMALL, [[0, 1, 2]])
    leader, follower, other = readers = [Script("", "far_readers.py", replica, replica + 1) for replica in range(3)]
    try:
        offer = json.loads(writer.hear())
        for reader in readers:
            reader.say(offer)
        assert {reader.hear() for reader in readers} == {'"ready"'}
        follower.end()
        for bucket in range(3):
            writer.say("next")
            content_U = np.random.default_rng(bucket).integers(0, 256, SMALL, dtype=np.uint8)
            for reader in (leader, other):
                reader.say(bucket)
            assert [json.loads(reader.hear()) for reader in (leader, other)] == [[checksum_bytes(content_U)]] * 2
        with pytest.raises(ConnectionRefusedError):  # nobody listens any more where they have met
            socket.create_connection((offer["address"], offer["port"]), timeout=5)
        leader.end()
        other.say(3)
        assert "rollout 0 left the transport" in other.hear()
        for _ in range(3, 40):
            writer.say("next")
        assert "a rollout is gone" in writer.hear()
    finally:
        for script in (writer, *readers):
            script.end()


@pytest.mark.usefixtures("warm_children")
def test_a_reader_behind_one_that_stands_still_goes_when_the_driver_says_so() -> None:
    """In a broadcast some readers pass on. One that is stopped, or whose cable is cut, keeps its connections."""
    writer = Script("", "far_writer.py", "127.0.0.1", 4, SMALL * 16, [[0], [1], [2]])
    readers = [Script("", "far_readers.py", replica, replica + 1) for replica in range(3)]
    try:
        offer = json.loads(writer.hear())
        for reader in readers:
            reader.say(offer)
        assert {reader.hear() for reader in readers} == {'"ready"'}
        for reader in readers[:2]:
            reader.process.send_signal(signal.SIGSTOP)
        writer.say("next")
        readers[2].say(0)
        heard: list[str] = []
        listening = threading.Thread(target=lambda: heard.append(readers[2].hear()), daemon=True)
        listening.start()
        listening.join(1.0)
        assert not heard, "it waits for one of the others"
        readers[2].process.send_signal(signal.SIGUSR1)
        listening.join(60)
        assert "is gone, the driver says" in heard[0]
    finally:
        for script in (writer, *readers):
            script.end()
