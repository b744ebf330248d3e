"""Lose the connection to a gateway in the middle of an answer, and go on where it broke off.

Plain HTTP: any client that keeps the id of the last event can do this, at any gateway of the queue.
"""

import json
import os
from collections.abc import Iterator

import httpx


def texts(response: httpx.Response) -> Iterator[tuple[str, str]]:
    """Yield the id and the text of each event until the answer is complete."""
    response.raise_for_status()
    event_id = ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data" and value != "[DONE]":
            for choice in json.loads(value).get("choices", ()):
                yield event_id, choice["delta"].get("content") or ""


gateway = httpx.Client(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    headers={"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"},
    timeout=60,
)
question = {
    "model": gateway.get("models").json()["data"][0]["id"],
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 64,
    "stream": True,
}
with gateway.stream("POST", "chat/completions", json=question) as response:
    job_id = response.headers["X-Inferq-Job-Id"]
    for seen, (event_id, text) in enumerate(texts(response), start=1):
        print(text, end="", flush=True)
        last_id = event_id
        if seen == 5:
            break

# The connection is gone; the answer is not: the worker goes on, and its tokens are kept.
print("|", end="", flush=True)
with gateway.stream("GET", f"streams/{job_id}", headers={"Last-Event-ID": last_id}) as response:
    for _, text in texts(response):
        print(text, end="", flush=True)
print()
gateway.close()
