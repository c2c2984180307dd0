"""Readers of the transport `group` on one host, all in this process: a thread for each.

    far_readers.py FIRST LAST

Reads the offer from standard input, and then a line per bucket. Prints "ready", and per bucket the checksums that the
readers found, or what went wrong. SIGUSR1 stands for the driver's word that a rank of the group is gone.
"""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

from backends import activity
from backends.weights import lost_peers
from backends.weights.checksum import checksum_bytes
from specs.errors import RlctlError
from workers.transports import open_reader


def main() -> None:
    activity.begin("import_bucket", 1, counted=False)
    signal.signal(signal.SIGUSR1, lambda *_: lost_peers.tell(1))
    offer = json.loads(sys.stdin.readline())
    replicas = range(int(sys.argv[1]), int(sys.argv[2]))
    readers = [open_reader("group", {}, replica) for replica in replicas]
    with ThreadPoolExecutor(len(readers)) as pool:
        list(pool.map(lambda reader: reader.begin(offer), readers))
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            bucket = int(line)
            nbytes = offer["sizes"][bucket]
            try:
                windows = list(pool.map(lambda reader, bucket=bucket: reader.receive(bucket, []), readers))
                found: object = sorted({checksum_bytes(window[:nbytes]) for window in windows})
            except RlctlError as error:
                found = error.message
            print(json.dumps(found), flush=True)
            if isinstance(found, str):
                return


main()
