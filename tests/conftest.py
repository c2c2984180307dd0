"""What every test shares: quiet threads, and one place that says where the optional real data lies."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from gpu import has_gpu

# Before anything imports numpy or torch: idle threads must not spin on a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# So too for the roles of runs: where other tests keep the cores busy, threads that meet after every operation are many
# times as slow as one alone.
os.environ["RLCTL_CPU_CORES"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test depends on the network: what is not in the cache is asked where nobody listens, and refused at once.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
# A background job of a script ignores Ctrl-C, `nohup` ignores a hang-up, and children inherit both: tests send them.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


HANGS_S = 480  # what takes longer has no end; on a busy machine a whole run takes many times as long


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out tests that are slow or start a process")


def pytest_configure(config: pytest.Config) -> None:
    """With `--quick` a test is skipped the moment it starts a process."""

    def no_process(event: str, _: object) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and "PYTEST_CURRENT_TEST" in os.environ:
            pytest.skip("starts a process")

    if config.option.quick:
        config.option.markexpr = f"({config.option.markexpr or 'not gpu'}) and not slow"
        sys.addaudithook(no_process)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow files, the longest first, and skip tests marked `gpu` where there is no NVIDIA GPU."""
    slow = {item.path: mark.kwargs.get("minutes", 0) for item in items if (mark := item.get_closest_marker("slow"))}
    items.sort(key=lambda item: -slow.get(item.path, -1))  # stable: a file stays together
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(HANGS_S))
    if has_gpu():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU on this machine")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end. Engines ask for full garbage collections, which would walk
    through all of it each time: two thirds of the time of some files."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder named by RLCTL_TEST_DATA (real data sets); the test is skipped where it is not set."""
    folder = os.environ.get("RLCTL_TEST_DATA")
    if not folder:
        pytest.skip("RLCTL_TEST_DATA is not set")
    return Path(folder)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Return the only kind of event loop in which async tests run."""
    return "asyncio"


@pytest.fixture
def warm_children() -> Iterator[None]:
    """What the test starts with torch in it is a fork of a process that has imported it (`warm.py`)."""
    with warm.children():
        yield


@pytest.fixture
def without_group() -> None:
    """An engine of another test that was not closed may have left this process in a group."""
    from backends.train.role_group import leave_group

    leave_group()
