"""What the engine is asked for, and the one growing token list that answers it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.blocks.prefix_chain import PrefixChain

if TYPE_CHECKING:
    from inferq.worker.engine.requests.group import SequenceGroup


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """What an earlier run published of one output; `is_finished`: its end was published too."""

    token_ids: tuple[int, ...] = ()
    is_finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request in token ids, checked by `Engine.add_request`.

    `resumed` has what an earlier run published of each output, by index: they go on after it, and
    those that it does not reach start anew. Requests are served by `priority` (lower is more
    urgent), then `arrival` (any one clock), then `request_id`. Requests with different `cache_salt`
    never share a prefix. `adapter` is the name of one of the engine's, empty for the base model.
    `params.seed` is set. What happens to a `traced` one is told by `Engine.take_events`.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    resumed: tuple[ResumedOutput, ...] = ()
    priority: int = 0
    arrival: float = 0.0
    cache_salt: str = ""
    adapter: str = ""
    traced: bool = False


class SequenceStatus(Enum):
    """Where a sequence stands with the scheduler."""

    #: Holds no blocks: new, or preempted to be computed again.
    WAITING = "waiting"
    RUNNING = "running"
    #: Holds host blocks only.
    SWAPPED = "swapped"
    #: Ended or aborted; holds no blocks.
    FINISHED = "finished"


class Sequence:
    """A token list (prompt, then output), how much of it is computed, and its KV blocks.

    Token `i` lives in block `block_table[i // block_size]`, or of `host_table` while it is swapped
    out. The runner reads; only the engine writes. `order` is total: smaller is served first and
    preempted last.
    """

    __slots__ = (
        "adapter",
        "block_table",
        "child_index",
        "cumulative_logprob",
        "group",
        "host_table",
        "is_ending",
        "num_computed_tokens",
        "num_prompt_tokens",
        "order",
        "params",
        "pending_children",
        "prefix_chain",
        "request_id",
        "spare_slots",
        "status",
        "token_ids",
    )

    group: SequenceGroup

    def __init__(self, request: EngineRequest, block_size: int, child_index: int = 0) -> None:
        self.request_id = request.request_id
        self.child_index = child_index
        self.params = request.params
        self.adapter = request.adapter
        self.token_ids = [*request.prompt_token_ids]
        if child_index < len(request.resumed):
            self.token_ids += request.resumed[child_index].token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        #: Sum of the raw log-probabilities of the output; None if they are not known.
        self.cumulative_logprob = None if self.num_output_tokens else 0.0
        self.block_table: list[int] = []
        self.host_table: list[int] = []
        self.prefix_chain = PrefixChain(block_size, request.cache_salt, request.adapter)
        self.status = SequenceStatus.WAITING
        #: Whether it ends with its last token, which is being sampled: whatever that will be.
        self.is_ending = False
        #: The children to be forked when the prompt is computed: the first is the sequence itself.
        self.pending_children: tuple[int, ...] = ()
        #: Sequences that may run beside it once it forks.
        self.spare_slots = 0
        self.order = (request.priority, request.arrival, request.request_id, child_index)

    def fork(self, child_index: int) -> Sequence:
        """Return a sequence that goes on from the same tokens; the blocks are not acquired yet."""
        child = Sequence.__new__(Sequence)
        child.request_id, child.params, child.group = self.request_id, self.params, self.group
        child.child_index, child.adapter = child_index, self.adapter
        child.token_ids = self.token_ids.copy()
        child.num_prompt_tokens = self.num_prompt_tokens
        child.num_computed_tokens = self.num_computed_tokens
        child.cumulative_logprob = self.cumulative_logprob
        child.block_table = self.block_table.copy()
        child.host_table = []
        child.prefix_chain = self.prefix_chain.copy()
        child.status = self.status
        child.is_ending = False
        child.pending_children = ()
        child.spare_slots = 0
        child.order = (*self.order[:3], child_index)
        return child

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated, those of an earlier run included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens known and not computed; one left is a decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_slots(self) -> int:
        """Running sequences that it counts for."""
        return 1 + self.spare_slots

    @property
    def priority(self) -> int:
        """The request's priority; lower is more urgent."""
        return self.order[0]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended or was aborted."""
        return self.status is SequenceStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r} {self.child_index}, {self.status.value}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens} tokens, "
            f"blocks {self.block_table})"
        )
