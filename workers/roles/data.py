"""The data role: it holds the tokenised prompts of a run and serves them with their rows."""

from __future__ import annotations

import os

from backends import activity
from backends.hf.tokenizer import TextCodec, load_codec
from backends.protocol import Rank
from specs.wire import bodies
from specs.wire.role_config import DataConfig
from workers.data.data_set import RunData, RunRows, open_data, open_rows
from workers.rank_report import as_built
from workers.roles import handlers_of
from workers.serve import Emit, Handlers, Reply, Request


class Data:
    """The one rank of the data role."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._config: DataConfig | None = None
        self._codec: TextCodec | None = None
        self._data: RunData | None = None
        self._rows: RunRows | None = None

    def build(self, call: Request[DataConfig], emit: Emit) -> Reply:
        """Load the tokenizer. Raises ModelError."""
        config = self._config = call.body
        self._codec = load_codec(config.model_path, trust_remote_code=config.trust_remote_code, today=config.today)
        return as_built(config.role, self.rank, engine="prompts", device="cpu", model=None).model_dump(), {}

    def open_data(self, call: Request[bodies.Nothing], emit: Emit) -> Reply:
        """Read and tokenise all data. Raises DataError naming the file and row."""
        assert self._config is not None, "build comes first"
        assert self._codec is not None
        activity.describe(activity.verb(), "row", counted=False)
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        if self._config.rows is not None:
            self._rows = open_rows(self._config, self._codec, threads)
            return self._rows.report(), {}
        assert self._config.data is not None
        self._data = open_data(self._config, self._codec, threads)
        return self._data.report(self._config.data.answer_column), {}

    def rows(self, call: Request[bodies.DrawRows], emit: Emit) -> Reply:
        """The rows at a position of the cursor, which the body holds as it is after them."""
        assert self._rows is not None, "open_data comes first"
        columns, state = self._rows.draw(call.body.what, call.body.position, call.body.count)
        return state, columns

    def prompts(self, call: Request[bodies.Prompts], emit: Emit) -> Reply:
        """The prompts at a position of the cursor, each repeated for its group. The body holds the cursor after them,
        and under `rows` the rows that a scorer needs, by their numbers in `row_B`."""
        assert self._config is not None, "build comes first"
        data = self._data or self._rows
        assert data is not None, "open_data comes first"
        prompts = data.prompts(call.body.what, call.body.name)
        columns, state = prompts.draw(call.body.position, call.body.count, call.body.group_size)
        tells = self._config.tells_messages
        rows = prompts.table.rows_of(columns["row_B"], self._config.row_columns, messages=tells)
        return {**state, "rows": rows}, columns


def handlers(rank: Rank) -> Handlers:
    return handlers_of(Data(rank))
