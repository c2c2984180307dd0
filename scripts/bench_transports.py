"""Every weight transport between two processes, against a plain memcpy of the bytes that travel, and what checking
costs.

    python scripts/bench_transports.py                                # 128 MiB of fp32 weights, over every transport
    python scripts/bench_transports.py --MiB 512 --bucket-MiB 8 --transports folder --cases fp32
    python scripts/bench_transports.py --transports shm ring               # shared memory: written in place, and
    through the ring

The weights are those of a Qwen2 of about that size. A sync is the real one: the actor's Exporter here, the rollout's
Importer of the `torch` engine in a process of its own, checksums compared, both ends told as `rlctl/loop/sync.py`
does, both with the threads that roles on shared devices get. A round is one memcpy (one thread, warm memory, the bytes
on the wire: 2 for each element of bf16), one sync, and each end of the transport by itself while the other waits: what
the sync would take if that end were all of it. "unchecked" is a sync in other processes, with a hash that does nothing.

`ring` is the transport `shm` as it is to several rollouts, or to an engine that shares no memory.

Cases: `fp32` and `bf16`, actor and rollout alike, and `cast`, an fp32 actor whose weights become bf16 on their way.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _bench import actor_config, model_config, rollout_config, write_config
from numpy.typing import NDArray

from specs.schema.engines.ddp_table import DdpTable
from specs.schema.spec import TransportKind
from workers.transports.base import BLOCK_BYTES, BLOCKS

CASES = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "bf16"), "cast": ("fp32", "bf16")}  # of actor, of rollout
RING = "ring"
THREADS = str(len(os.sched_getaffinity(0)))  # of each: on shared devices only one of them computes at a time


def _kind(transport: str) -> TransportKind:
    return "shm" if transport == RING else transport  # type: ignore[return-value]


def model_folder(folder: Path, mib: float) -> None:
    """config.json of an untied Qwen2 of about `mib` MiB in fp32."""
    hidden, layers = 512, 8
    per_layer = 4 * hidden * hidden + 3 * hidden * 4 * hidden
    vocab = max(64, round((mib * 2**20 / 4 - layers * per_layer) / (2 * hidden)))
    if vocab == 64:
        layers = max(1, round(mib * 2**20 / 4 / per_layer))
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 8, "vocab_size": vocab, "max_position_embeddings": 128, "tie_word_embeddings": False,
        "eos_token_id": 0, "torch_dtype": "float32",
    }  # fmt: skip
    write_config(folder, config)


def forget_hashing() -> None:
    """Checksums that cost nothing and say nothing."""
    import xxhash

    class Nothing:
        def update(self, data: object) -> None: ...

        def hexdigest(self) -> str:
            return ""

    xxhash.xxh3_64 = Nothing
    xxhash.xxh3_64_hexdigest = lambda data: ""


def ring_alone() -> NDArray[np.uint8]:
    """As large as that of the transport, and on pages of its own as that is."""
    ring_U = np.frombuffer(mmap.mmap(-1, BLOCKS * BLOCK_BYTES), dtype=np.uint8)
    ring_U[:] = 1
    return ring_U


def blocks_alone(ring_U: NDArray[np.uint8], nbytes: int) -> Iterator[NDArray[np.uint8]]:
    """A ring that never lets anybody wait."""
    for number, start in enumerate(range(0, nbytes, BLOCK_BYTES)):
        first = number % BLOCKS * BLOCK_BYTES
        yield ring_U[first : first + min(BLOCK_BYTES, nbytes - start)]


def reader_main(transport: str, options: dict[str, Any], folder: str, dtype: str, checked: bool) -> None:
    """The rollout: obeys lines of JSON."""
    from backends.protocol import Rank
    from backends.torch_rollout.engine import TorchRolloutEngine
    from specs.wire.bodies import SentWeight, WireWeight
    from workers.transports.ends import Importer, spec_of

    config = rollout_config(model_config(folder, 64, dtype=dtype), {"kind": "torch"}, 32)
    engine = TorchRolloutEngine.build(config, Rank())
    importer = Importer(engine, 0, _kind(transport), options)
    if transport == RING:
        engine.share_weights = lambda: None  # type: ignore[method-assign]
    ring_U = ring_alone()
    if not checked:
        forget_hashing()
    print("{}", flush=True)
    for line in sys.stdin:
        told, answer = json.loads(line), {}
        if "offer" in told:
            specs = None if told["specs"] is None else [spec_of(WireWeight(**spec)) for spec in told["specs"]]
            importer.begin(specs, told["offer"])
        elif "bucket" in told:
            answer = importer.read(told["bucket"], [SentWeight(**entry) for entry in told["entries"]])
        elif "alone" in told:
            started = time.perf_counter()
            for spec in engine.weight_specs():
                engine.import_in_blocks(spec, blocks_alone(ring_U, spec.nbytes))
            answer = {"seconds": time.perf_counter() - started}
        else:
            importer.reader.rest()
        print(json.dumps(answer), flush=True)


class ReaderProcess:
    def __init__(self, *told: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--reader", json.dumps(told)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": THREADS},
        )  # fmt: skip
        self.hear()

    def tell(self, told: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        print(json.dumps(told), file=self.process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    def end(self) -> None:
        self.process.communicate()


def sync_s(exporter: Any, reader: ReaderProcess, dtype: str, bucket_bytes: int, *, first: bool) -> float:
    """Seconds of one verified sync."""
    started = time.perf_counter()
    offer = exporter.begin(dtype, bucket_bytes, 1, first)
    reader.tell({"specs": offer["specs"], "offer": offer["offer"]})
    reader.hear()
    if offer["in_blocks"]:
        reader.tell({"bucket": 0, "entries": []})
        compare(reader, exporter.write(0)["entries"])
    else:
        move_in_buckets(exporter, reader, offer)
    reader.tell({})
    reader.hear()
    exporter.end()
    return time.perf_counter() - started


def move_in_buckets(exporter: Any, reader: ReaderProcess, offer: dict[str, Any]) -> None:
    reading: list[dict[str, Any]] | None = None
    for bucket in range(offer["buckets"]):
        if reading is not None and offer["windows"] < 2:
            compare(reader, reading)
            reading = None
        entries = exporter.write(bucket)["entries"]
        if reading is not None:
            compare(reader, reading)
        reader.tell({"bucket": bucket, "entries": entries})
        reading = entries
    if reading is not None:
        compare(reader, reading)


def compare(reader: ReaderProcess, entries: list[dict[str, Any]]) -> None:
    assert reader.hear() == {entry["name"]: entry["checksum"] for entry in entries}


class Memcpy:
    """A copy of so many bytes, from warm memory to warm memory."""

    def __init__(self, nbytes: int) -> None:
        self.source_U, self.target_U = np.ones(nbytes, dtype=np.uint8), np.ones(nbytes, dtype=np.uint8)

    def seconds(self) -> float:
        started = time.perf_counter()
        np.copyto(self.target_U, self.source_U)
        return time.perf_counter() - started


def actor_alone_s(engine: Any, dtype: str, ring_U: NDArray[np.uint8]) -> float:
    started = time.perf_counter()
    for weight in engine.export_weights(dtype):
        weight.copy_in_blocks(blocks_alone(ring_U, weight.spec.nbytes))
    return time.perf_counter() - started


def measure(transport: str, folder: str, case: str, bucket_bytes: int, rounds: int, checked: bool) -> dict[str, Any]:
    """Seconds of each round, by what was timed. The first two are left out: pages are faulted in."""
    from backends.ddp.engine import DdpTrainEngine
    from backends.protocol import Rank
    from workers.transports.ends import Exporter

    own, sent = CASES[case]
    config = actor_config(model_config(folder, 64, dtype=own), DdpTable(), 64)
    ring_U = ring_alone()
    taken: dict[str, list[float]] = {"memcpy": [], "sync": [], "actor": [], "rollout": []}
    with tempfile.TemporaryDirectory() as shared:
        options = {"folder": {"folder": shared}, "group": {"address": "127.0.0.1", "device": "cpu"}}.get(transport, {})
        reader = ReaderProcess(transport, options, folder, sent, checked)
        engine = DdpTrainEngine.build(config, Rank())
        if not checked:
            forget_hashing()
        exporter = Exporter(engine, 0, _kind(transport), options)
        memcpy = Memcpy(sum(spec.nbytes for spec in engine.weight_specs(sent)))  # type: ignore[arg-type]
        try:
            for number in range(rounds + 2):
                taken["memcpy"].append(memcpy.seconds())
                taken["sync"].append(sync_s(exporter, reader, sent, bucket_bytes, first=number == 0))
                taken["actor"].append(actor_alone_s(engine, sent, ring_U))
                reader.tell({"alone": True})
                taken["rollout"].append(reader.hear()["seconds"])
        finally:
            reader.end()
            exporter.close()
    return {"nbytes": len(memcpy.source_U), **{name: seconds[2:] for name, seconds in taken.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--MiB", type=float, default=128.0, help="of weights in fp32")
    parser.add_argument("--bucket-MiB", type=float, default=16.0, help="on the transports that go in buckets")
    parser.add_argument("--transports", nargs="+", default=["shm", RING, "folder", "group"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        reader_main(*json.loads(args.reader))
        return
    if args.one:  # each measurement in a process of its own: the hash is taken away for good
        print(json.dumps(measure(*json.loads(args.one))))
        return
    print(f"{args.rounds} rounds, {THREADS} threads; GB/s and ms: median")
    print("                        GB/s, alone               sync          sync's share of memcpy")
    print("transport   case    MB  memcpy  actor rollout   GB/s    ms unchecked   median   min   max")
    with tempfile.TemporaryDirectory() as folder:
        model_folder(Path(folder), args.MiB)
        for transport in args.transports:
            for case in args.cases:
                told = (transport, folder, case, int(args.bucket_MiB * 2**20), args.rounds)
                _row(transport, case, _one(*told, True), _one(*told, False))


def _one(*told: Any) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", json.dumps(told)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": THREADS}
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _row(transport: str, case: str, checked: dict[str, Any], unchecked: dict[str, Any]) -> None:
    nbytes = checked["nbytes"]
    memcpy, actor, rollout, sync = (
        nbytes / statistics.median(checked[name]) / 1e9 for name in ("memcpy", "actor", "rollout", "sync")
    )
    shares = [plain / whole for plain, whole in zip(checked["memcpy"], checked["sync"], strict=True)]
    print(
        f"{transport:6} {case:4} {nbytes / 1e6:5.0f} {memcpy:7.1f} {actor:6.1f} {rollout:7.1f} {sync:6.1f} "
        f"{nbytes / sync / 1e6:5.1f} {statistics.median(unchecked['sync']) * 1e3:9.1f} "
        f"{statistics.median(shares):8.0%} {min(shares):5.0%} {max(shares):5.0%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
