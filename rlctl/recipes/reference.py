"""Log-probs of rows under a reference, computed step by step or once before the first; and the KL from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from specs.errors import RunDirError
from specs.wire import bodies
from specs.wire.batch import Batch
from specs.wire.messages import Verb
from specs.wire.wire_tensors import decode, encode

if TYPE_CHECKING:
    from rlctl.loop.driver import Driver, ModelColumn

AT_ONCE = 256  # rows whose log-probs are computed in one request


@dataclass
class Reference:
    """Log-probs of the model that the actor is compared with: the role `ref`, or the actor without its adapters."""

    def column(self, driver: Driver) -> ModelColumn:
        """Return how the models compute it."""
        if driver.ref is not None:
            return driver.logprobs_of(driver.ref)
        return driver.logprobs_of(driver.lead, adapters=False)

    def begin(self, driver: Driver, done: int) -> None:
        """Prepare for the first step of an attempt; `done` steps are behind it."""

    def logprobs(self, driver: Driver, rows: Batch, step: int) -> NDArray[np.float32]:
        """Return `ref_logprob_T` of rows."""
        return driver.compute({"ref": self.column(driver)}, rows, step)["ref"]

    def kl(self, driver: Driver, rows: Batch, step: int) -> NDArray[np.float32]:
        """Return `kl_B`, the same for every row: the mean log-ratio of actor and reference of completions under other
        rows' prompts, at least 0 (Ethayarajh et al. 2024, §4.2)."""
        unlike = unlike_rows(rows)
        columns = driver.compute({"actor": driver.logprobs_of(driver.lead), "ref": self.column(driver)}, unlike, step)
        mean = float((columns["actor"].astype(np.float64) - columns["ref"]).sum()) / len(unlike)
        return np.full(len(rows), max(0.0, mean), dtype=np.float32)


def unlike_rows(rows: Batch) -> Batch:
    """Return each row's prompt with the completion of the row before it, the first one's with the last's."""
    tokens, masks = rows.sequences("tokens_T"), rows.sequences("loss_mask_T")
    starts = [int(np.argmax(mask)) for mask in masks]
    others = [len(tokens) - 1, *range(len(tokens) - 1)]
    tokens = [np.concatenate([tokens[n][: starts[n]], tokens[m][starts[m] :]]) for n, m in enumerate(others)]
    masks = [np.concatenate([masks[n][: starts[n]], masks[m][starts[m] :]]) for n, m in enumerate(others)]
    return Batch(
        {
            "length_B": np.array([len(each) for each in tokens]),
            "tokens_T": np.concatenate(tokens),
            "loss_mask_T": np.concatenate(masks),
        }
    )


@dataclass
class PrecomputedReference(Reference):
    """Log-probs of all rows, computed once before the first step, and kept in `path`. Where the reference is no role of
    its own, the actor is it before it has learned."""

    path: Path
    known: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # row → its log-probs, sequence by sequence

    def column(self, driver: Driver) -> ModelColumn:
        return driver.logprobs_of(driver.ref or driver.lead)

    def begin(self, driver: Driver, done: int) -> None:
        """Raises RunDirError where the file of an earlier attempt is gone."""
        if self.path.is_file():
            self._read()
            return
        if done and driver.ref is None:
            hint = "put it back from a copy, or start a new run with model.path = the directory of this one"
            raise RunDirError(f"{self.path} is missing, and the actor has learned since it was made", hint=hint)
        wanted: tuple[Literal["all", "eval"], ...] = ("all", "eval")
        for what in wanted:
            for rows in self._rows(driver, what):
                self._keep(rows, super().logprobs(driver, rows, done))
        self._write()

    def logprobs(self, driver: Driver, rows: Batch, step: int) -> NDArray[np.float32]:
        _, first = np.unique(rows["row_B"], return_index=True)
        found = np.concatenate([self.known[int(rows["row_B"][at])] for at in np.sort(first)])
        assert len(found) == rows.num_tokens, "a row has changed since its log-probs were computed"
        return found

    @staticmethod
    def _rows(driver: Driver, what: Literal["all", "eval"]) -> Iterator[Batch]:
        position = 0
        while True:
            request = bodies.DrawRows(what=what, position=position, count=AT_ONCE)
            answer = driver.data.call(Verb.ROWS, request)[0]
            if not len(answer.batch):
                return
            position = bodies.RowsDrawn.of(answer).position
            yield answer.batch

    def _keep(self, rows: Batch, logprob_T: NDArray[np.float32]) -> None:
        ends = rows.offsets
        for row in np.unique(rows["row_B"]).tolist():
            at = np.flatnonzero(rows["row_B"] == row)
            self.known[row] = logprob_T[ends[at[0]] : ends[at[-1] + 1]]

    def _write(self) -> None:
        rows = list(self.known)
        values = [self.known[row] for row in rows]
        tensors: dict[str, NDArray[Any]] = {
            "row": np.array(rows, dtype=np.int64),
            "length": np.array([len(each) for each in values], dtype=np.int64),
            "logprob": np.concatenate(values) if values else np.zeros(0, dtype=np.float32),
        }
        part = self.path.with_suffix(".part")
        part.write_bytes(encode(tensors))
        part.replace(self.path)

    def _read(self) -> None:
        found = decode(self.path.read_bytes())
        pieces = np.split(found["logprob"], np.cumsum(found["length"])[:-1])
        self.known = dict(zip(found["row"].tolist(), pieces, strict=True))
