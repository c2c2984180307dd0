"""GB/s of every weight road between two processes, against a plain memcpy of the same bytes, and what checking costs.

    python scripts/bench_roads.py                                # 128 MiB in fp32 and bf16, over shm, folder, group
    python scripts/bench_roads.py --MiB 512 --bucket-MiB 8 --roads folder

The weights are those of a Qwen2 of about that size. A sync is the real one: the actor's Exporter here, the rollout's
Importer of the `torch` engine in a process of its own, checksums compared, both ends told as `rlctl/sync.py` does. The
best of several passes counts, as for memcpy; the first pass (pages are faulted in) is left out. "unchecked" is the same
with a hash that does nothing: what verification costs is the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _bench import actor_config, model_config, rollout_config, write_config

from specs.schema import DdpEngine


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


def reader_main(road: str, options: dict[str, Any], folder: str, dtype: str, checked: bool) -> None:
    """The rollout: obeys lines of JSON."""
    from backends.protocol import Rank
    from backends.torch_rollout.engine import TorchRolloutEngine
    from workers.weights import Importer, from_json

    config = rollout_config(model_config(folder, 64, dtype=dtype), {"kind": "torch"}, 32)
    importer = Importer(TorchRolloutEngine.build(config, Rank()), 0, road, options)  # type: ignore[arg-type]
    if not checked:
        forget_hashing()
    print("{}", flush=True)
    for line in sys.stdin:
        told, answer = json.loads(line), {}
        if "offer" in told:
            importer.begin([from_json(spec) for spec in told["specs"]], told["offer"])
        elif "bucket" in told:
            answer = importer.read(told["bucket"], told["entries"])
        else:
            importer.reader.rest()
        print(json.dumps(answer), flush=True)


class ReaderProcess:
    def __init__(self, *told: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--reader", json.dumps(told)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
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


def passes(exporter: Any, reader: ReaderProcess, dtype: str, bucket_bytes: int, count: int) -> list[float]:
    """Seconds of each pass."""
    taken = []
    for number in range(count):
        started = time.perf_counter()
        offer = exporter.begin(dtype, bucket_bytes, 1, number == 0)
        reader.tell({"specs": offer["specs"], "offer": offer["offer"]})
        reader.hear()
        if offer["in_blocks"]:
            reader.tell({"bucket": 0, "entries": offer["specs"]})
            compare(reader, exporter.write(0)["entries"])
        else:
            move_in_buckets(exporter, reader, offer)
        reader.tell({})
        reader.hear()
        exporter.end()
        taken.append(time.perf_counter() - started)
    return taken


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


def memcpy_s(nbytes: int, repeats: int) -> float:
    """Best seconds of one copy of so many bytes, from warm memory to warm memory."""
    source_U, target_U = np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        np.copyto(target_U, source_U)
        best = min(best, time.perf_counter() - started)
    return best


def measure(road: str, folder: str, dtype: str, bucket_bytes: int, repeats: int, checked: bool) -> dict[str, float]:
    import torch

    from backends.ddp.engine import DdpTrainEngine
    from backends.protocol import Rank
    from workers.weights import Exporter

    torch.set_num_threads(1)
    config = actor_config(model_config(folder, 64, dtype=dtype), DdpEngine(), 64)
    with tempfile.TemporaryDirectory() as shared:
        options = {"folder": {"folder": shared}, "group": {"address": "127.0.0.1", "device": "cpu"}}.get(road, {})
        reader = ReaderProcess(road, options, folder, dtype, checked)
        engine = DdpTrainEngine.build(config, Rank())
        if not checked:
            forget_hashing()
        exporter = Exporter(engine, 0, road, options)  # type: ignore[arg-type]
        nbytes = sum(spec.nbytes for spec in engine.weight_specs(dtype))  # type: ignore[arg-type]
        try:
            best = min(passes(exporter, reader, dtype, bucket_bytes, repeats + 1)[1:])
        finally:
            reader.end()
            exporter.close()
    return {"nbytes": nbytes, "seconds": best, "memcpy_s": memcpy_s(nbytes, repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--MiB", type=float, default=128.0, help="of weights in fp32")
    parser.add_argument("--bucket-MiB", type=float, default=16.0, help="on the roads that go in buckets")
    parser.add_argument("--roads", nargs="+", default=["shm", "folder", "group"])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reader:
        reader_main(*json.loads(args.reader))
        return
    if args.one:  # each measurement in a process of its own: the hash is taken away for good
        print(json.dumps(measure(*json.loads(args.one))))
        return
    print(
        f"{'road':8} {'dtype':5} {'MB':>6} {'GB/s':>6} {'memcpy':>7} {'share':>6} {'sync ms':>8} {'of it checking':>15}"
    )
    with tempfile.TemporaryDirectory() as folder:
        model_folder(Path(folder), args.MiB)
        for road in args.roads:
            for dtype in args.dtypes:
                told = (road, folder, dtype, int(args.bucket_MiB * 2**20), args.passes)
                _row(road, dtype, _one(*told, True), _one(*told, False))


def _one(*told: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", json.dumps(told)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _row(road: str, dtype: str, checked: dict[str, float], unchecked: dict[str, float]) -> None:
    nbytes, seconds = checked["nbytes"], checked["seconds"]
    share = checked["memcpy_s"] / seconds
    checking_s, rate, plain = seconds - unchecked["seconds"], nbytes / seconds, nbytes / checked["memcpy_s"]
    print(
        f"{road:8} {dtype:5} {nbytes / 1e6:6.0f} {rate / 1e9:6.2f} {plain / 1e9:7.2f} "
        f"{share:6.0%} {seconds * 1e3:8.1f} {checking_s * 1e3:8.1f} ms {checking_s / seconds:4.0%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
