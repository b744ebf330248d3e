"""What Helm says after an installation."""

from __future__ import annotations

from typing import Any


def notes(helm: Any, chart: Any, scenario: str, *changes: str) -> str:
    values = chart / "ci" / f"{scenario}-values.yaml"
    more = [part for change in changes for part in ("--set", change)]
    done = helm.run("install", "release", chart, "--dry-run=client", "--values", values, *more)
    assert done.returncode == 0, done.stderr
    text: str = done.stdout.split("NOTES:\n", 1)[1]
    return text


def test_it_lists_the_pools_and_says_what_to_do_next(helm4, chart) -> None:
    text = notes(helm4, chart, "several-pools")
    assert "chat: Qwen3-8B on queue chat, 2 workers" in text
    assert "chat-spot: Qwen3-8B on queue chat, 0 to 20 workers (keda)" in text
    assert "helm test release" in text
    assert "service/release-inferq-gateway 8000:80" in text


def test_it_warns_of_what_is_open_or_may_be_lost(helm4, chart) -> None:
    minimal = notes(helm4, chart, "minimal")
    assert "Whoever reaches the gateway may use it" in minimal
    assert "each rendering makes new ones" in minimal
    every = notes(helm4, chart, "every-option")
    assert "Whoever reaches" not in every
    assert "jobs and results go with Valkey's pod" in every


def test_it_says_what_webhooks_need(helm4, chart) -> None:
    assert "needs the secret that it names, of inferq-webhooks." in notes(helm4, chart, "webhooks")
    assert "deliver no webhook" in notes(
        helm4, chart, "webhooks", "tasks.webhooks.existingSecret=", "gateway.acceptWebhooks=false"
    )
    assert "webhook" not in notes(helm4, chart, "minimal")


def test_it_says_where_metrics_and_batches_are(helm4, chart) -> None:
    minimal = notes(helm4, chart, "minimal")
    assert "of workers on the port 8081, of gateways on 8001." in minimal
    assert "Batches" not in minimal
    assert "metrics.podMonitor.enabled tells" not in notes(helm4, chart, "metrics")
    assert "their files lie in s3://inferq-batches/llm." in notes(helm4, chart, "batches")
    webhooks = notes(helm4, chart, "webhooks")
    assert "on the claim release-inferq-batches, which stays when this release goes" in webhooks


def test_without_a_gateway_it_points_to_the_sdk(helm4, chart) -> None:
    text = notes(helm4, chart, "no-gateway")
    assert "use the SDK, with INFERQ_REDIS_URL" in text
    assert "port-forward" not in text
