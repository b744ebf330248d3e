"""Writes the files of the Helm chart that follow from others: `make chart-files`.

The settings in `values.schema.json` come from the settings models, `files/acl.json` from the
protocol, README.md from the comments of `values.yaml`. With `--check` nothing is written: exits
with 1 where a file is not what it should be.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from inferq.producer.gateway.settings import GatewaySettings
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.acl import COMMANDS, Role
from inferq.protocol.keys import BatchKeys, GatewayKeys, TaskKeys
from inferq.runtime.settings import ProcessSettings
from inferq.runtime.shared_settings import BATCH_SETTINGS
from inferq.worker.settings import WorkerSettings

CHART = Path(__file__).resolve().parents[1] / "helm"

#: Settings that the chart gives values of its own.
WORKER_OWN = frozenset(
    {
        *("model", "served_model_name", "lora_adapters", "redis_url", "queue", "partition"),
        *("worker_name", "device", "tensor_parallel_size", "drain_timeout_s"),
        *("health_port", "health_host", "tracing_endpoint"),
    }
)
GATEWAY_OWN = frozenset(
    {
        *("redis_url", "queues", "partitions", "host", "port", "models"),
        *("accept_without_workers", "accept_webhooks", "api_keys_file"),
        *("shutdown_delay_s", "shutdown_timeout_s", "metrics_port", "metrics_host"),
        *("tracing_endpoint", *BATCH_SETTINGS),
    }
)
TASKS_OWN = frozenset(
    {
        *("redis_url", "queues", "partitions", "health_port", "health_host"),
        *("webhook_secrets", "webhook_secrets_file", "shutdown_timeout_s"),
        *("tracing_endpoint", *BATCH_SETTINGS),
    }
)
#: What a role may reach beside its queues.
PREFIXES = {
    Role.GATEWAY: [GatewayKeys.PREFIX, BatchKeys.PREFIX],
    Role.TASKS: [TaskKeys.PREFIX, BatchKeys.PREFIX],
}

_README_HEAD = """\
# The Helm chart of inferq

Workers, an OpenAI-shaped gateway, tasks (webhooks, batches), and a Valkey if there is none yet.
[docs/kubernetes.md](../docs/kubernetes.md) says how to install, upgrade, scale and size it.

```
helm install inferq helm/ --set pools.chat.model=Qwen/Qwen3-8B
```

Needs Kubernetes 1.29 or later; for `autoscaling.type=keda` KEDA 2.17 or later. `ci/` has values of
scenarios. This file is made of the comments in `values.yaml` by `make chart-files`.

## Values

| Value | Default | |
|---|---|---|
"""


def settings_schema(kind: type[ProcessSettings], own: frozenset[str]) -> dict[str, Any]:
    """Return the schema of the settings that a user of the chart may give."""
    properties = kind.model_json_schema()["properties"]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name: _plain(schema) for name, schema in properties.items() if name not in own
        },
    }


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a field's schema without null, which Helm takes as "leave out"."""
    kept = {key: value for key, value in schema.items() if key not in ("title", "default")}
    options = [option for option in kept.pop("anyOf", ()) if option != {"type": "null"}]
    return kept | (options[0] if len(options) == 1 else {"anyOf": options} if options else {})


def described_values(text: str) -> Iterator[tuple[str, str]]:
    """Yield (path, description) of each value of values.yaml that has one."""
    path: list[tuple[int, str]] = []
    description: str | None = None
    for line in text.splitlines():
        if comment := re.fullmatch(r"\s*# -- (.*)", line):
            description = comment[1]
        elif value := re.fullmatch(r"(\s*)([A-Za-z]\w*):.*", line):
            indent = len(value[1])
            path = [part for part in path if part[0] < indent] + [(indent, value[2])]
            if description is not None:
                yield ".".join(name for _, name in path), description
            description = None


def readme() -> str:
    """Return README.md."""
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    rows = []
    for path, description in described_values(text):
        default: Any = values
        for name in path.split("."):
            default = default[name]
        rows.append(f"| `{path}` | `{json.dumps(default)}` | {description} |")
    return _README_HEAD + "\n".join(rows) + "\n"


def generated() -> dict[Path, str]:
    """Return the text of every generated file."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    schema["definitions"]["workerSettings"] = settings_schema(WorkerSettings, WORKER_OWN)
    schema["definitions"]["gatewaySettings"] = settings_schema(GatewaySettings, GATEWAY_OWN)
    schema["definitions"]["tasksSettings"] = settings_schema(TasksSettings, TASKS_OWN)
    rights = {
        role.value: {
            "commands": list(COMMANDS[role]),
            "prefixes": PREFIXES.get(role, []),
        }
        for role in (Role.GATEWAY, Role.TASKS, Role.WORKER)
    }
    return {
        CHART / "values.schema.json": json.dumps(schema, indent=2) + "\n",
        CHART / "files" / "acl.json": json.dumps(rights, indent=2) + "\n",
        CHART / "README.md": readme(),
    }


def main() -> int:
    """Write the files, or with `--check` compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only look whether they are current")
    check = parser.parse_args().check
    stale = [
        path for path, text in generated().items() if not path.exists() or path.read_text() != text
    ]
    for path in stale:
        if check:
            print(f"{path.relative_to(CHART.parent)} is not current: run `make chart-files`")
        else:
            path.write_text(generated()[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
