"""A rollout's end of a transport in a process of its own, told what to do by lines of JSON: for tests that kill it.

`{"begin": offer, "transport": …, "options": …, "replica": …}`, `{"read": bucket, "entries": […]}`, which answers the
bytes' checksum of each weight, `{"blocks": nbytes}`, which answers that of so much of a stream, and `{"rest": true}`;
every answer is a line too.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from backends.weights.checksum import Digest, checksum_bytes
from workers.transports import open_reader


def main() -> None:
    reader = None
    for line in sys.stdin:
        told = json.loads(line)
        answer: object = "ok"
        if "begin" in told:
            reader = reader or open_reader(told["transport"], told["options"], told["replica"])
            reader.begin(told["begin"])
        elif "blocks" in told:
            digest = Digest()
            for block_U in reader.blocks(told["blocks"]):
                digest.update(block_U)
            reader.flush()
            answer = digest.hexdigest()
        elif "rest" in told:
            reader.rest()
        else:
            window_U = reader.receive(told["read"], told["entries"])
            held_U = window_U if isinstance(window_U, np.ndarray) else window_U.cpu().numpy()
            answer = [checksum_bytes(held_U[e["offset"] : e["offset"] + e["nbytes"]]) for e in told["entries"]]
        print(json.dumps(answer), flush=True)


main()
