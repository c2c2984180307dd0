"""A part of a Ray cluster: Ray chooses and watches the nodes, and passes the text of shells on them.

Required hosts lie in one placement group, each on a node of its own, so that two runs do not hold half of what they
need. A host that a run can begin without has a group to itself: Ray places it when there is room, and places it again
when its node is lost. The driver's own GPUs are a bundle too, unless the job that it runs in holds them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.processes.shells import HostNeeds
from specs.errors import Problem, SpecError
from specs.packages import package_root

_ANSWER_S = 30.0
_DIAL_S = 5.0
_LOOK_S = 0.1
_QUEUED_S = 2.0  # until it is said that a run waits for room
_OPTIONAL_S = 2.0  # for hosts that a run can begin without
_LOCAL = ("127.", "localhost")


@dataclass
class _Placed:
    """An actor on a host; `lost`: with its node."""

    actor: Any
    lost: bool = False


class RayShell:
    """A shell on a node: `Shell`. Ray's own threads file what arrives, and send one call after the other: an actor that
    serves several at once may take them in any order."""

    def __init__(self, place: Callable[[], _Placed], devices: str, log_path: Path) -> None:
        """`place` returns the host's actor, another one where the last is lost."""
        self._place, self._devices, self._log_path = place, devices, log_path
        self._key = os.urandom(8).hex()
        self._heard: deque[bytes] = deque()
        self._code: int | None = None
        self._lock = threading.RLock()  # a call that has ended by then files itself in this thread
        self._calls: deque[Callable[[], Any]] = deque()
        self._opened = False
        self._open()

    @property
    def lost(self) -> bool:
        return self._placed.lost

    def write(self, text: str) -> None:
        self._call(lambda: self._node.write.remote(self._key, text))

    def read(self) -> bytes:
        return b"".join(self._heard.popleft() for _ in range(len(self._heard)))

    def poll(self) -> int | None:
        return self._code

    def hang_up(self) -> None:
        if self._opened:
            self._call(lambda: self._node.hang_up.remote(self._key))
        elif self._code is None:  # Ray has found no node for it
            self._code = -signal.SIGHUP

    def kill(self) -> None:
        if self._opened:
            self._node.kill.remote(self._key).future().add_done_callback(self._failed)
        self._code = -signal.SIGKILL if self._code is None else self._code

    def close(self) -> None:
        self.hang_up()

    def _call(self, call: Callable[[], Any]) -> None:
        with self._lock:
            self._calls.append(call)
            if len(self._calls) == 1:
                self._send_next()

    def _send_next(self) -> None:
        """Make the first call in line, once there is a shell. Call it with the lock."""
        if self._calls and self._opened:
            self._calls[0]().future().add_done_callback(self._sent)

    def _open(self) -> None:
        self._placed = self._place()
        self._node = self._placed.actor
        self._node.open.remote(self._key, self._devices).future().add_done_callback(self._begin)

    def _begin(self, future: Future[None]) -> None:
        if self._failed(future):
            if self._code is None:  # Ray chose a node that was gone by then
                self._open()
            return
        self._node.read.remote(self._key).future().add_done_callback(self._file)
        with self._lock:
            self._opened = True
            self._send_next()

    def _sent(self, future: Future[None]) -> None:
        if self._failed(future):
            return
        with self._lock:
            self._calls.popleft()
            self._send_next()

    def _file(self, future: Future[str]) -> None:
        if self._failed(future):
            return
        reply = json.loads(future.result())
        if reply["text"]:
            self._heard.append(reply["text"].encode())
        if reply["code"] is None:
            self._node.read.remote(self._key).future().add_done_callback(self._file)
        else:
            self._code = reply["code"]

    def _failed(self, future: Future[Any]) -> bool:
        """Return whether Ray could not make a call: the node, its actor or the cluster is gone."""
        error = future.exception()
        if error is None:
            return False
        with suppress(OSError), self._log_path.open("a", encoding="utf-8") as log_file:
            log_file.write(f"Ray: {error}\n")
        self._placed.lost = _lost_with_node(error)
        if self._code is None and (self._opened or not self._placed.lost):
            self._code = -signal.SIGKILL
        return True


class RayCluster:
    """Hosts of a run on nodes of a Ray cluster: `Cluster`. Host 0 is the node where this process runs."""

    replaces = gives_devices = True

    def __init__(self, address: str, needs: Sequence[HostNeeds]) -> None:
        self._given, self._needs = address, needs
        self._ray: Any = None  # the module, once it is connected
        self.address, self.names = "", list[str]()
        self.pending: dict[str, str] = {}
        self._groups: dict[int, tuple[Any, int]] = {}  # host → placement group, and the number of its bundle there
        self._nodes: dict[int, _Placed] = {}

    def count(self, gpus: int) -> int:
        self._ray = _connect(self._given, lambda text: None)
        try:
            return 1 + len(_with_gpus(self._alive()[1], gpus))
        finally:
            self.close()

    def reserve(self, say: Callable[[str], None]) -> None:
        """Wait for the required hosts, and `say` so. Raise SpecError where there is no cluster, where it is another
        version's, or where it can never have them."""
        self._ray = _connect(self._given, say)
        from ray.util.placement_group import placement_group

        self.address = self._ray.util.get_node_ip_address()
        required = [number for number, needs in enumerate(self._needs) if needs.required]
        self._check_size()
        here = self._ray.get_runtime_context().get_node_id()
        group = placement_group(
            [self._bundle(number) for number in required],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": here} if number == 0 else {} for number in required],
        )
        self._groups = {number: (group, index) for index, number in enumerate(required)}
        self._wait_for(group, [number for number in required if number], say)
        taken, missing = [self._node_of(number) for number in required], list[int]()
        until = time.monotonic() + _OPTIONAL_S
        for number in sorted({*range(len(self._needs))} - {*required}):
            elsewhere = {"ray.io/node-id": f"!in({','.join(taken)})"}
            alone = placement_group([self._bundle(number)], bundle_label_selector=[elsewhere])
            self._groups[number] = (alone, 0)
            if _placed(alone, until - time.monotonic()):
                taken.append(self._node_of(number))
            else:
                missing.append(number)
        self._nodes = {number: self._node(number) for number in self._groups if number}
        self.names = ["this host", *(self._name(number) for number in range(1, len(self._needs)))]
        self.pending = {self.names[number]: "is not there: Ray has no room for it yet" for number in missing}
        if self._needs[0].gpus and not _holds_gpus():
            self._nodes[0] = self._node(0)
            os.environ["CUDA_VISIBLE_DEVICES"] = self._ray.get(self._nodes[0].actor.gpus.remote(), timeout=_ANSWER_S)

    def _bundle(self, number: int) -> dict[str, float]:
        """Return the resources of a host. Those of this one are its job's where it has any."""
        if number == 0 and (_holds_gpus() or not self._needs[0].gpus):
            return {"CPU": 0.001}
        return self._needs[number].bundle

    def _check_size(self) -> None:
        """Raise SpecError where the cluster's nodes could not hold the required hosts if nobody else used them."""
        if lacks := self._lacks([number for number, needs in enumerate(self._needs) if needs.required]):
            hint = "add nodes (ray start --address=HEAD), or ask for fewer with nodes and devices"
            raise SpecError([Problem("cluster.address", f"the Ray cluster {lacks}", hint, f'"{self._given}"')])

    def _alive(self) -> tuple[Mapping[str, float], list[Mapping[str, float]]]:
        """Return the resources of this node, and those of each other that is alive."""
        nodes = {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}
        return nodes.pop(self._ray.get_runtime_context().get_node_id(), {}), [*nodes.values()]

    def _lacks(self, required: Sequence[int]) -> str:
        own, others = self._alive()
        if not _holds_gpus() and own.get("GPU", 0) < self._needs[0].gpus:
            return f"has {own.get('GPU', 0):g} GPUs on this node, where the run needs {self._needs[0].gpus}"
        for gpus in sorted({self._needs[number].gpus for number in required if number}, reverse=True):
            asked = [number for number in required if number and self._needs[number].gpus >= gpus]
            if len(_with_gpus(others, gpus)) < len(asked):
                each = f"with {gpus} GPUs and a CPU each" if gpus else "with a CPU each"
                has = ", ".join(f"{node.get('GPU', 0):g} GPUs and {node.get('CPU', 0):g} CPUs" for node in others)
                listed = f"({len(others)} of them: {has})" if others else "(it has none)"
                return f"lacks nodes: the run needs {len(asked)} besides this one {each} {listed}"
        return ""

    def _wait_for(self, group: Any, others: Sequence[int], say: Callable[[str], None]) -> None:
        since, said = time.monotonic(), False
        while not _placed(group, 0.5):
            self._check_size()
            if not said and time.monotonic() - since > _QUEUED_S:
                said = True
                wanted = ", ".join(str(self._needs[number]) for number in others)
                say(f"queued: Ray has no room yet for {len(others)} more hosts ({wanted}); Ctrl-C gives up")

    def _node(self, number: int) -> _Placed:
        """Make an actor in a host's bundle; Ray may still have to place it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from workers.ray_node import RayNode

        group, index = self._groups[number]
        options = {
            "num_cpus": 0,
            "num_gpus": self._bundle(number).get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
            "runtime_env": {"env_vars": {"PYTHONPATH": str(package_root())}},
            "max_concurrency": 1000,
        }
        return _Placed(self._ray.remote(RayNode).options(**options).remote())

    def _node_of(self, number: int) -> str:
        """Return the id of a host's node; empty where it has none."""
        from ray.util.placement_group import placement_group_table

        group, index = self._groups[number]
        return str(placement_group_table(group)["bundles_to_node_id"].get(index, ""))

    def _name(self, number: int) -> str:
        """Return a host's name: its node's, where there is one."""
        node_id = self._node_of(number)
        found = [node["NodeManagerHostname"] for node in self._ray.nodes() if node["NodeID"] == node_id]
        return f"node {number} ({found[0]})" if found else f"node {number}"

    def shell(self, number: int, devices: Sequence[int], env: Mapping[str, str], log_path: Path) -> RayShell:
        """Open a shell; on another node where this host's is lost, as soon as Ray has one."""

        def place() -> _Placed:
            if self._nodes[number].lost:
                self._nodes[number] = self._node(number)
            return self._nodes[number]

        return RayShell(place, ",".join(map(str, devices)), log_path)

    def close(self) -> None:
        if self._ray is not None:
            self._ray.shutdown()


def _placed(group: Any, within_s: float) -> bool:
    """Return whether Ray places a group within so many seconds. Its own `wait` knows whole seconds only, and leaves a
    request at the head each time."""
    from ray.util.placement_group import placement_group_table

    until = time.monotonic() + within_s
    while placement_group_table(group)["state"] != "CREATED":
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True


def _with_gpus(nodes: Sequence[Mapping[str, float]], gpus: int) -> list[Mapping[str, float]]:
    return [node for node in nodes if node.get("GPU", 0) >= gpus and node.get("CPU", 0) >= 1]


def _lost_with_node(error: BaseException) -> bool:
    from ray.exceptions import RayActorError

    return isinstance(error, RayActorError) and not error.actor_init_failed


def _holds_gpus() -> bool:
    """Return whether this process is a Ray job that was given GPUs (`ray job submit --entrypoint-num-gpus`)."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and bool(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _connect(address: str, say: Callable[[str], None]) -> Any:
    """Return the module `ray`, connected."""
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    value = f'"{address}"'
    try:
        if address != "auto":  # Ray itself tries for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_DIAL_S).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        ray._private.worker._worker_logs_enabled = False  # it writes about lost nodes to standard output
    except (OSError, ValueError) as error:  # Ray's ConnectionError among them
        hint = "start one with ray start --head, or name its address (host:port of the head)"
        raise SpecError(
            [Problem("cluster.address", f"no Ray cluster is there: {_first(error)}", hint, value)]
        ) from None
    except RuntimeError as error:  # another version of Ray or Python
        hint = "install the versions that the cluster has"
        raise SpecError([Problem("cluster.address", f"Ray refuses: {_first(error)}", hint, value)]) from None
    finally:
        signal.signal(signal.SIGTERM, handler)
    head = ray.get_runtime_context().gcs_address
    if not head.startswith(_LOCAL) and os.environ.get("RAY_AUTH_MODE") != "token":
        say(f"warning: the Ray cluster at {head} takes orders from anybody who reaches it: set RAY_AUTH_MODE=token")
    return ray


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
