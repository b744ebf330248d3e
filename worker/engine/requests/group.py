"""The sequences of one request, from its prompt to the end of its last output."""

from __future__ import annotations

from itertools import count

from inferq.protocol.messages import TokenLogprob
from inferq.worker.engine.requests.beam import BeamSearch
from inferq.worker.engine.requests.sequence import EngineRequest, Sequence, SequenceStatus
from inferq.worker.engine.sampling.edit_asks import edits_follow_output


class SequenceGroup:
    """One request's live sequences.

    Outputs that start anew share one sequence for the prompt, whose `pending_children` they are
    until it is forked; from then on they are scheduled independently. The beams of a search are
    scheduled together: `sequences` then has the live beams in the order of the search.
    """

    __slots__ = (
        "beam_indexes",
        "decides_on_host",
        "has_forked",
        "has_started",
        "is_traced",
        "num_blocks_wanted",
        "num_cached_tokens",
        "params",
        "prompt_logprobs",
        "request_id",
        "search",
        "sequences",
    )

    def __init__(
        self,
        request: EngineRequest,
        block_size: int,
        *,
        eos_token_ids: frozenset[int],
        max_length: int,
    ) -> None:
        self.request_id = request.request_id
        self.is_traced = request.traced
        self.params = params = request.params
        self.search: BeamSearch | None = None
        if params.beam_width is not None:
            room = max_length - len(request.prompt_token_ids)
            self.search = BeamSearch(
                params,
                eos_token_ids=eos_token_ids,
                max_new_tokens=min(room, params.max_tokens or room),
            )
        #: Whether the host must know a sampled token before the next step can be launched.
        self.decides_on_host = self.search is not None or edits_follow_output(params)
        self.sequences = self._first_sequences(request, block_size)
        for sequence in self.sequences:
            sequence.group = self
        #: Whether sequences may share a block that is not full.
        self.has_forked = False
        #: Whether it ran before: its own tokens found in the cache are no hits then.
        self.has_started = False
        #: Prompt tokens found in the prefix cache when the request first ran.
        self.num_cached_tokens = 0
        #: The blocks that the beams of a search hold in their next step, known while it waits.
        self.num_blocks_wanted = 0
        #: Those of the prompt's tokens after the first, so far; None if they are not wanted.
        self.prompt_logprobs: list[TokenLogprob] | None = None
        restarts = not request.resumed or not request.resumed[0].token_ids
        if params.prompt_logprobs is not None and restarts:
            self.prompt_logprobs = []
        self.beam_indexes = count(1)

    @staticmethod
    def _first_sequences(request: EngineRequest, block_size: int) -> list[Sequence]:
        fresh: list[int] = []
        sequences: list[Sequence] = []
        for index in range(request.params.num_candidates):
            output = request.resumed[index] if index < len(request.resumed) else None
            if output is None or not (output.is_finished or output.token_ids):
                fresh.append(index)
            elif not output.is_finished:
                sequences.append(Sequence(request, block_size, index))
        if fresh:
            prompt = Sequence(request, block_size, fresh[0])
            if len(fresh) > 1:
                prompt.pending_children = tuple(fresh)
                prompt.spare_slots = len(fresh) - 1
            sequences.append(prompt)
        return sequences

    @property
    def steps_together(self) -> bool:
        """Whether all sequences must be computed in one step: two beams or more."""
        return self.search is not None and len(self.sequences) > 1

    @property
    def hit_limit(self) -> int | None:
        """How many tokens of the prompt may be found in the cache instead of computed."""
        collected = self.prompt_logprobs
        if collected is None or len(collected) == self.sequences[0].num_prompt_tokens - 1:
            return None
        return len(collected)

    def with_status(self, status: SequenceStatus) -> list[Sequence]:
        """Return the live sequences that stand there."""
        return [sequence for sequence in self.sequences if sequence.status is status]

    def waits_for_sibling(self, sequence: Sequence, block_size: int) -> bool:
        """Whether a running sequence is about to compute prompt blocks that `sequence` shares."""
        if len(self.sequences) == 1:
            return False
        shared = sequence.num_prompt_tokens // block_size * block_size
        return any(s.num_computed_tokens < shared for s in self.with_status(SequenceStatus.RUNNING))

    def note_blocks_wanted(self, block_size: int) -> None:
        """Work out how many distinct blocks the beams hold in their next step.

        Beams are different texts of one length, so that full blocks are shared exactly if their
        links are equal, and each beam has the block to itself that its next token is written to.
        """
        full = (len(self.sequences[0].token_ids) - 1) // block_size
        digests: set[bytes] = set()
        for sequence in self.sequences:
            sequence.prefix_chain.extend(sequence.token_ids, full)
            digests.update(link.digest for link in sequence.prefix_chain.links[:full])
        self.num_blocks_wanted = len(digests) + len(self.sequences)

    def collect_prompt_logprobs(self, first: int, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Take those after the prompt positions from `first` on; what is known is passed over."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - first :]

    def take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Return all, with None for the first token, and forget them."""
        collected, self.prompt_logprobs = self.prompt_logprobs, None
        return None if collected is None else (None, *collected)
