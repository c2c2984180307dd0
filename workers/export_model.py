"""The process behind `rlctl export-checkpoint`: runs in the interpreter that trained the actor.

Started as `python -m workers.export_model REQUEST.json`; writes `{"proof": …}` or `{"error": …}` to the file that the
request names, so that nothing a library prints can be mistaken for the answer.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from specs.errors import RlctlError


def main(request_path: str) -> int:
    request = json.loads(Path(request_path).read_text())
    answer = Path(request["answer"])
    try:
        from backends.export import prove, write_model

        checkpoint, out = Path(request["checkpoint"]), Path(request["out"])
        trust = bool(request["trust_remote_code"])
        write_model(checkpoint, request["model_path"], out, request["dtype"], trust)
        proof = prove(out, checkpoint, Path(request["proof_file"]), request["dtype"], trust)
        answer.write_text(json.dumps({"proof": dataclasses.asdict(proof)}))
    except RlctlError as error:
        answer.write_text(json.dumps({"error": error.message, "hint": error.hint}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
