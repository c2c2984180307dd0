"""The process behind `rlctl export-checkpoint`: runs in the interpreter that trained the role.

Started as `python -m workers.offline.export_model REQUEST.json`; writes `{"proof": …}` or `{"error": …}` to the file
that the request names, so that output of a library is never mistaken for the reply, and `{"what", "done",
"total"}` (bytes) to another as progress.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import sys
import time
from pathlib import Path

from specs.errors import RlctlError
from specs.json_file import write_object
from workers.watchdog import die_with_parent

PROGRESS_EVERY_S = 0.2


class ProgressFile:
    """Progress in a file that is replaced atomically."""

    def __init__(self, path: Path) -> None:
        self._path, self._last, self._what = path, 0.0, ""

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what == self._what and now - self._last < PROGRESS_EVERY_S:
            return
        self._what, self._last = what, now
        write_object(self._path, {"what": what, "done": done, "total": total})


def main(request_path: str) -> int:
    die_with_parent()
    request = json.loads(Path(request_path).read_text())
    reply, out = Path(request["answer"]), Path(request["out"])
    try:
        from backends.export.adapter_export import write_adapters
        from backends.export.model_export import Source, prove, prove_adapters, write_model

        checkpoint = Path(request["checkpoint"])
        trust = bool(request["trust_remote_code"])
        source = Source(checkpoint, request["model_path"], request["dtype"], trust, request["head"])
        progress = ProgressFile(Path(request["progress"]))
        proof_file = Path(request["proof_file"])
        if request["adapter_only"]:
            write_adapters(checkpoint, out, source.model_path, trust)
            proof = prove_adapters(source, out, proof_file)
        else:
            write_model(source, out, int(request["shard_bytes"]), progress)
            proof = prove(source, out, proof_file, int(request["memory_bytes"]), progress)
        reply.write_text(json.dumps({"proof": dataclasses.asdict(proof)}))
    except RlctlError as error:
        reply.write_text(json.dumps({"error": error.message, "hint": error.hint}))
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        shutil.rmtree(out, ignore_errors=True)  # the reply needs disk space, too
        reply.write_text(json.dumps({"error": "the disk is full", "hint": "free some space, or name another folder"}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
