"""Puts a job into each queue and looks at the answer; looks whether the gateway is ready."""

import json
import os
import urllib.request

from inferq import Client, SamplingParams

for queue, model in json.loads(os.environ["MODELS"]).items():
    with Client(queue=queue) as client:
        job = client.submit(
            os.environ["PROMPT"], SamplingParams(max_tokens=8, ignore_eos=True), model=model
        )
        result = job.result(timeout_s=float(os.environ["TIMEOUT_S"]))
    tokens = len(result.outputs[0].token_ids)
    print(f"{queue}: {model} answered {result.outputs[0].text!r}")
    if tokens != 8:
        raise SystemExit(f"{queue}: {tokens} tokens instead of 8")

if url := os.environ.get("GATEWAY_URL"):
    # the gateway is in this cluster: a proxy in the environment is not for it
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/readyz", timeout=30) as answer:
        print(f"gateway: {answer.status}")
