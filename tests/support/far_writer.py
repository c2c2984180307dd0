"""The actor's end of the transport `group` in a process of its own, for readers on another host.

    far_writer.py ADDRESS BUCKETS NBYTES HOSTS

Prints the offer, then sends buckets of random bytes, the seed of each its number; a line on standard input lets the
next one go. It prints what went wrong with the last one, or "sent".
"""

from __future__ import annotations

import json
import sys

import numpy as np

from specs.errors import RlctlError
from workers.transports import open_writer
from workers.transports.base import Readers


def main() -> None:
    address, buckets, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    hosts = json.loads(sys.argv[4])
    writer = open_writer("group", {"address": address, "device": "cpu"})
    offer = writer.begin([nbytes] * buckets, 2, Readers(hosts))
    print(json.dumps(offer), flush=True)
    for bucket in range(buckets):
        sys.stdin.readline()
        try:
            content_U = np.random.default_rng(bucket).integers(0, 256, nbytes, dtype=np.uint8)
            np.asarray(writer.window(bucket))[:nbytes] = content_U
            writer.send(bucket, [])
        except RlctlError as error:
            print(error.message, flush=True)
            return
    writer.rest()
    print("sent", flush=True)


main()
