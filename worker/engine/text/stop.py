"""Stop strings: found in the text as it grows, wherever tokens begin and end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string in the text: how many of the text's last characters start with it, or follow
    it."""

    stop: str
    num_from_start: int
    num_after: int


class StopMatcher:
    """Looks for stop strings in a growing text, in time linear in the text (Aho and Corasick 1975).

    `num_held` is the length of the longest end of the text so far that a stop string could begin
    with: what must not be shown yet.
    """

    __slots__ = ("_depth_held", "_fallback", "_first", "_longest", "_next", "_state", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        #: (state, character) -> state. State 0 is "no stop string has begun"; every other state
        #: is a beginning of some stop string, the longest one that the text ends with.
        self._next: dict[tuple[int, str], int] = {}
        #: For each state: the stop string that it ends with, the longest one, or "".
        self._longest = [""]
        #: For each state: where to go on when no stop string continues with the next character.
        self._fallback = [0]
        #: For each state: the length of the longest beginning that can still grow.
        self._depth_held = [0]
        self._state = 0
        for stop in stops:
            self._insert(stop)
        self._link()
        self._first = frozenset(stop[0] for stop in stops)

    @property
    def num_held(self) -> int:
        """See the class."""
        return self._depth_held[self._state]

    def feed(self, text: str, *, counts: bool = True) -> StopMatch | None:
        """Take the next piece of text and return the stop string that completed within it.

        Of several, the one that starts earliest; of those, the longest. With `counts` false none
        is returned, but one may have begun.
        """
        if self._state == 0 and self._first.isdisjoint(text):
            return None
        found: tuple[int, str] | None = None
        for end, character in enumerate(text, start=1):
            stop = self._longest[self._advance(character)]
            if stop and counts:
                start = end - len(stop)
                # The end grows, so at an equal start the later one is the longer.
                if found is None or start <= found[0]:
                    found = (start, stop)
        if found is None:
            return None
        start, stop = found
        return StopMatch(stop, len(text) - start, len(text) - start - len(stop))

    def _advance(self, character: str) -> int:
        state = self._state
        while (after := self._next.get((state, character))) is None and state:
            state = self._fallback[state]
        self._state = after or 0
        return self._state

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            key = (state, character)
            if key not in self._next:
                self._next[key] = len(self._longest)
                self._longest.append("")
                self._fallback.append(0)
                self._depth_held.append(0)
            state = self._next[key]
        self._longest[state] = stop

    def _link(self) -> None:
        """Work out the fallbacks, shorter beginnings first."""
        children: dict[int, list[tuple[str, int]]] = {}
        for (state, character), child in self._next.items():
            children.setdefault(state, []).append((character, child))
        queue = deque([(0, 0)])
        while queue:
            state, depth = queue.popleft()
            fallback = self._fallback[state]
            self._longest[state] = self._longest[state] or self._longest[fallback]
            self._depth_held[state] = depth if state in children else self._depth_held[fallback]
            for character, child in children.get(state, ()):
                if state:
                    target = fallback
                    while (after := self._next.get((target, character))) is None and target:
                        target = self._fallback[target]
                    self._fallback[child] = after or 0
                queue.append((child, depth + 1))
