"""Ask many questions at once with asyncio; all streams share one connection."""

import asyncio

from inferq import AsyncClient, InferqError, SamplingParams

COUNTRIES = ["France", "Italy", "Spain", "Portugal", "Greece"]


async def ask(client: AsyncClient, country: str) -> str:
    """Return the answer, or what went wrong."""
    job = await client.submit(
        messages=[{"role": "user", "content": f"What is the capital of {country}?"}],
        params=SamplingParams(temperature=0, max_tokens=32),
        idempotency_key=f"capital-{country}",
    )
    try:
        result = await job.result(timeout_s=120)
    except InferqError as error:
        return f"{country}: {error}"
    return f"{country}: {result.text} ({result.usage.completion_tokens} tokens)"


async def main() -> None:
    """Print the answers as they are complete."""
    async with AsyncClient() as client:
        for answer in asyncio.as_completed([ask(client, country) for country in COUNTRIES]):
            print(await answer)


if __name__ == "__main__":
    asyncio.run(main())
