"""A user's own token loss, called as the engines call it."""

from __future__ import annotations

from pathlib import Path

import torch

from backends.train.own_loss import own_loss

IN_PLACE = """
def loss(logprob, anchor_logprob, advantage):
    advantage.clamp_(-1, 1)
    logprob -= anchor_logprob
    anchor_logprob.zero_()
    return -advantage * logprob.exp()
"""


def test_it_may_change_what_it_is_given(tmp_path: Path) -> None:
    """The anchor may be the log-probs themselves, and the metrics read all of them afterwards."""
    (tmp_path / "own.py").write_text(IN_PLACE)
    logprob_N, advantage_N = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([5.0, -0.5])
    own_loss(f"{tmp_path}/own.py:loss", logprob_N, logprob_N.detach(), advantage_N).sum().backward()
    assert logprob_N.tolist() == [-1.0, -2.0]
    assert logprob_N.grad is not None
    assert logprob_N.grad.tolist() == [-1.0, 0.5]
    assert advantage_N.tolist() == [5.0, -0.5]
