"""Samples as a reward model reads them: the conversation and what the policy wrote, through the reward model's own chat
template and tokenizer. Nothing is truncated: what is too long has no score.

Of several turns the reward model sees one answer, its parts in lines of their own, as all grading does.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.hf.tokenizer import TextCodec, load_codec, pad_token_of
from specs.errors import ModelError
from specs.schema.metric import Metric, metrics
from specs.wire.role_config import ScoreText
from workers.chat.chat_renderer import ChatRenderer, ChatTemplateError, renderer_of
from workers.grading.pool import Grade
from workers.grading.terms import GradeRequest
from workers.joined_text import joined, without_padding

MODEL_CAUSES = ("model_overlong", "model_template")
_WITH_MODEL = "a reward term is a model"
METRICS: tuple[Metric, ...] = metrics(
    _WITH_MODEL,
    {
        "reward/failed_model_overlong": "Completions without a score: longer than `reward_model.max_sequence_tokens`.",
        "reward/failed_model_template": "Completions without a score: the reward model's chat template refuses them.",
    },
)


class ScoreTexts:
    """Makes tokens of texts for one reward model. A tokenizer with a chat template is always given a conversation, a
    prompt of plain text as the user's message; without one, prompt and completion as they are, and the
    end of sequence."""

    def __init__(self, config: ScoreText, actor: TextCodec) -> None:
        """`actor`: whose prompts are scored. Raises ModelError where there is no tokenizer, or no chat template for
        conversations."""
        self.config = config
        self.codec = load_codec(config.path, trust_remote_code=config.trust_remote_code, today=actor.today)
        self._chats = renderer_of(self.codec) if self.codec.has_chat_template else None
        self._pad = pad_token_of(config.path, trust_remote_code=config.trust_remote_code)
        if config.chat != "never" and actor.has_chat_template and not self.codec.has_chat_template:
            raise ModelError(
                f"reward model {config.path} has no chat template, and prompts are conversations",
                hint='use a reward model whose tokenizer has a chat template, or set data.chat = "never"',
            )

    def tokens(self, requests: Sequence[GradeRequest]) -> list[list[int] | Grade]:
        """Return each sample's tokens, or why it has none."""
        if self._chats is None:
            prompts, completions = [each.prompt for each in requests], [each.completion for each in requests]
            return [self._checked([*pair[0], *pair[1]]) for pair in joined(self.codec, prompts, completions)]
        texts = [self._text(self._chats, request) for request in requests]
        encoded = iter(self.codec.encode([text for text in texts if isinstance(text, str)], rendered=True))
        return [self._checked(next(encoded)) if isinstance(text, str) else text for text in texts]

    def _text(self, chats: ChatRenderer, request: GradeRequest) -> str | Grade:
        messages = request.messages or [{"role": "user", "content": request.prompt}]
        try:
            conversation = [*messages, {"role": "assistant", "content": request.completion}]
            return chats.render(conversation, begins_answer=False, tools=request.tools)
        except ChatTemplateError as error:
            return Grade(cause="model_template", text=f"reward model {self.config.path}: {error}")

    def _checked(self, ids: list[int]) -> list[int] | Grade:
        ids = without_padding(ids, self._pad)
        most = self.config.max_sequence_tokens
        if ids and len(ids) <= most:
            return ids
        text = f"reward_model.max_sequence_tokens = {most}: it has {len(ids)} tokens of the reward model"
        return Grade(cause="model_overlong", text=text)
