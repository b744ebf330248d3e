"""What decides, beside a request's body, what it asks for: settings of the gateway."""

from __future__ import annotations

from typing import Protocol


class RequestTerms(Protocol):
    """Has the gateway's settings of these names, or is what a batch keeps of them."""

    @property
    def default_max_tokens(self) -> int | None:
        """`max_tokens` of chats that give none."""

    @property
    def tool_format(self) -> str:
        """How the models write tool calls."""

    @property
    def accept_webhooks(self) -> bool:
        """Whether webhooks are delivered."""

    @property
    def max_prompts(self) -> int:
        """Most prompts in one request."""

    @property
    def max_outputs(self) -> int:
        """Most outputs of one request."""
