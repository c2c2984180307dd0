"""Prints names and shapes of a model's weights as transformers builds it: `python -m workers.offline.shapes`.

Reads a `ModelConfig` from standard input and writes one JSON object, name → shape; a tied weight once. Takes no memory
for weights. Exit code 1, with the reason as the last line of standard error, if it cannot be built.
"""

from __future__ import annotations

import json
import sys

from backends.hf.model_shape import model_shape
from specs.errors import ModelError
from specs.wire.role_config import ModelConfig
from workers.watchdog import die_with_parent, set_process_name


def main() -> int:
    die_with_parent()
    set_process_name("rlctl-shapes")
    try:
        shape = model_shape(ModelConfig.model_validate_json(sys.stdin.read()))
    except ModelError as error:
        print(error.message, file=sys.stderr)
        return 1
    print(json.dumps({name: weight.shape for name, weight in shape.weights.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
