"""Log-probs of rows under a reference, computed step by step or once before the first; and the KL from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from specs.errors import ChannelError
from specs.json_file import replace_file
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

    def prepare(self, driver: Driver) -> None:
        """Compute what is computed once, before a checkpoint is loaded."""

    def logprobs(self, driver: Driver, rows: Batch, step: int) -> NDArray[np.float32]:
        """Return `ref_logprob_T` of rows."""
        return driver.compute({"ref": self.column(driver)}, rows, step)["ref"]

    def kl(self, driver: Driver, unlike: Batch, step: int) -> NDArray[np.float32]:
        """Return `kl_B`, the same for every row: the mean log-ratio of actor and reference of completions under other
        rows' prompts (`unlike_rows`), at least 0 (Ethayarajh et al. 2024, §4.2)."""
        columns = driver.compute({"actor": driver.logprobs_of(driver.lead), "ref": self.column(driver)}, unlike, step)
        mean = float((columns["actor"].astype(np.float64) - columns["ref"]).sum()) / len(unlike)
        return np.full(len(unlike), max(0.0, mean), dtype=np.float32)


def unlike_rows(rows: Batch, max_tokens: int) -> Batch:
    """Return each row's prompt with the completion of the row before it, the first one's with the last's; its end is
    left out where both have more than `max_tokens`."""
    tokens, masks = rows.sequences("tokens_T"), rows.sequences("loss_mask_T")
    starts = [int(np.argmax(mask)) for mask in masks]
    pairs = [(n, starts[n], m, starts[m]) for n, m in enumerate([len(tokens) - 1, *range(len(tokens) - 1)])]
    tokens, masks = (
        [np.concatenate([each[n][:prompt], each[m][start:]])[:max_tokens] for n, prompt, m, start in pairs]
        for each in (tokens, masks)
    )
    return Batch(
        {
            "length_B": np.array([len(each) for each in tokens]),
            "tokens_T": np.concatenate(tokens),
            "loss_mask_T": np.concatenate(masks),
        }
    )


@dataclass
class PrecomputedReference(Reference):
    """Log-probs of rows, computed once: of the first `draws` that are trained on, or of all. Where the reference is no
    role of its own, the actor is it until a checkpoint is loaded, at every start. `path` keeps them for later attempts
    and forks; a digest of model, tokens and mask finds them there again, so that those of another model or row are
    never taken."""

    path: Path
    draws: int | None = None
    known: dict[bytes, NDArray[np.float32]] = field(default_factory=dict)  # digest → log-probs of a sequence
    model: bytes = b""  # whose they are

    def column(self, driver: Driver) -> ModelColumn:
        return driver.logprobs_of(driver.ref or driver.lead)

    def prepare(self, driver: Driver) -> None:
        """Compute those that the file does not have, and write them there also where that is interrupted."""
        built = driver.built[(driver.ref or driver.lead).role]
        self.model = f"{built.dtype} {built.weights_checksum}".encode()
        kept = self._read()
        trained_on = self._rows(driver, "all") if self.draws is None else self._rows(driver, "train", self.draws)
        unread = kept  # of rows that may still come
        try:
            for rows in chain(trained_on, self._rows(driver, "eval")):
                digests = self._digests(rows)
                self.known |= {digest: kept[digest] for digest in digests if digest in kept}
                if missing := [n for n, digest in enumerate(digests) if digest not in self.known]:
                    rows = rows.select(np.array(missing))
                    pieces = np.split(super().logprobs(driver, rows, 0), rows.offsets[1:-1])
                    self.known |= zip((digests[n] for n in missing), pieces, strict=True)
            unread = {}
        finally:
            if (known := unread | self.known).keys() != kept.keys():
                self._write(known)

    def logprobs(self, driver: Driver, rows: Batch, step: int) -> NDArray[np.float32]:
        return np.concatenate([self.known[digest] for digest in self._digests(rows)])

    def _digests(self, rows: Batch) -> list[bytes]:
        columns = zip(rows.sequences("tokens_T"), rows.sequences("loss_mask_T"), strict=True)
        return [blake2b(b"".join([self.model, *map(bytes, row)]), digest_size=16).digest() for row in columns]

    @staticmethod
    def _rows(driver: Driver, what: Literal["train", "all", "eval"], most: int = sys.maxsize) -> Iterator[Batch]:
        position = 0
        while position < most:
            request = bodies.DrawRows(what=what, position=position, count=min(AT_ONCE, most - position))
            answer = driver.data.call(Verb.ROWS, request)[0]
            if not len(answer.batch):
                return
            position = bodies.RowsDrawn.of(answer).position
            yield answer.batch

    def _write(self, known: Mapping[bytes, NDArray[np.float32]]) -> None:
        values = list(known.values())
        tensors: dict[str, NDArray[Any]] = {
            "digest": np.array([list(digest) for digest in known], dtype=np.uint8),
            "length": np.array([len(each) for each in values], dtype=np.int64),
            "logprob": np.concatenate(values),
        }
        replace_file(self.path, encode(tensors))

    def _read(self) -> dict[bytes, NDArray[np.float32]]:
        """Return what the file has; nothing where it was torn or does not say what its values are of."""
        try:
            found = decode(self.path.read_bytes())
        except (FileNotFoundError, ChannelError):
            return {}
        if "digest" not in found:
            return {}
        pieces = np.split(found["logprob"], np.cumsum(found["length"])[:-1])
        return dict(zip(map(bytes, found["digest"]), pieces, strict=True))
