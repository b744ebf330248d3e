"""Workloads straight into an engine in this process."""

from __future__ import annotations

import time

from workloads import Request

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest


class OfflinePath:
    """Runs requests on an engine; each run's prefixes are its own."""

    name = "offline"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, requests: list[Request], arrivals: list[float], salt: str) -> list[list[float]]:
        """Run requests that arrive at these times of `perf_counter`, in order.

        Return when each token of each came. Runs with equal `salt` share cached prefixes.
        """
        engine = self._engine
        times: dict[str, list[float]] = {str(index): [] for index in range(len(requests))}
        added = 0
        while added < len(requests) or engine.has_work():
            now = time.perf_counter()
            while added < len(requests) and arrivals[added] <= now:
                engine.add_request(_engine_request(str(added), requests[added], salt))
                added += 1
            if not engine.has_work():
                time.sleep(max(0.0, min(0.002, arrivals[added] - now)))
                continue
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                times[output.request_id] += [now] * len(output.token_ids)
        return list(times.values())


def _engine_request(request_id: str, request: Request, salt: str) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(request.prompt),
        params=SamplingParams(
            temperature=0.0, max_tokens=request.output_len, ignore_eos=True, seed=0
        ),
        arrival=time.monotonic(),
        cache_salt=salt,
    )
