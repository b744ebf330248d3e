"""What the chart starts is what the processes are: flags, variables, ports, paths and times."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest

from inferq.producer.gateway import command as gateway_command
from inferq.producer.gateway.routes import health as gateway_health
from inferq.producer.gateway.settings import GatewaySettings
from inferq.producer.tasks import command as tasks_command
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.servers import ServerUrl
from inferq.runtime.settings import load_settings as load_process_settings
from inferq.worker import command as worker_command
from inferq.worker import service as worker_service
from inferq.worker.insight.probes import WorkerProbes
from inferq.worker.pipe.engine_client import STOP_TIMEOUT_S
from inferq.worker.settings import WorkerSettings, load_settings

#: Variables that other libraries of the containers read.
FOREIGN = {
    *("HOME", "HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE"),
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
}
#: Variables that only the URL before them reads.
FOR_URLS = {"REDIS_PASSWORD", "SENTINEL_PASSWORD"}
#: Variables by which a client of S3 logs in.
STORAGE = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"}
#: What scenarios give as `extraEnv`.
GIVEN = {"HTTPS_PROXY", "SSL_CERT_FILE"}
SECRET = "s3cret-of_a.role~"


def environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    """The variables as the process sees them: references have been put in, in order."""
    environment: dict[str, str] = {}
    for variable in container.get("env", ()):
        assert variable["name"] not in environment
        value = variable.get("value", SECRET)
        for name in re.findall(r"\$\((\w+)\)", value):
            value = value.replace(f"$({name})", environment[name])
        environment[variable["name"]] = value
    return environment


@pytest.fixture
def as_process(monkeypatch: pytest.MonkeyPatch):
    """Makes the environment that of a container, without what this process inherited."""

    def apply(container: Mapping[str, Any]) -> dict[str, str]:
        import os

        for name in [name for name in os.environ if name.startswith("INFERQ_")]:
            monkeypatch.delenv(name)
        environment = environment_of(container)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return environment

    return apply


def worker_settings(container: Mapping[str, Any]) -> WorkerSettings:
    program, *arguments = container["args"]
    assert program == "worker"
    return load_settings(vars(worker_command.build_parser().parse_args(arguments)))


def test_workers_start_with_settings_that_the_model_accepts(rendering, as_process) -> None:
    for pod in rendering.workers():
        environment = as_process(pod.main)
        settings = worker_settings(pod.main)
        assert settings.worker_name == SECRET  # the pod's name, which comes by reference
        assert pod.owner["metadata"]["labels"]["inferq-partition"] == str(settings.partition)
        unknown = set(environment) - FOREIGN - FOR_URLS - GIVEN
        assert all(name.startswith("INFERQ_") for name in unknown), unknown
        assert not settings.redis_url.get_secret_value().endswith(")")


def test_gateways_start_with_settings_that_the_model_accepts(rendering, as_process) -> None:
    served = {}
    partitions = set()
    for pod in rendering.workers():
        as_process(pod.main)
        settings = worker_settings(pod.main)
        partitions.add(settings.partition)
        for name in (settings.model_name, *(settings.lora_adapters or ())):
            served[name] = settings.queue
    for pod in (pod for pod in rendering.pods if pod.component == "gateway"):
        environment = as_process(pod.main)
        program, *arguments = pod.main["args"]
        assert program == "gateway"
        given = vars(gateway_command.build_parser().parse_args(arguments))
        settings = gateway_command.read_settings(given)
        assert settings.models == served
        assert set(settings.queues) == set(served.values())
        assert settings.partitions == len(partitions) == max(partitions) + 1
        assert settings.accept_without_workers
        assert settings.host == "0.0.0.0"
        ports = {port["name"]: port["containerPort"] for port in pod.main["ports"]}
        assert ports == {"http": settings.port, "metrics": settings.metrics_port}
        assert set(environment) <= {"INFERQ_REDIS_URL", *FOR_URLS, *GIVEN, *STORAGE}


def tasks_settings(container: Mapping[str, Any]) -> TasksSettings:
    program, *arguments = container["args"]
    assert program == "tasks"
    given = vars(tasks_command.build_parser().parse_args(arguments))
    assert given.pop("burst") is False
    return load_process_settings(TasksSettings, given)


def test_tasks_start_with_settings_that_the_model_accepts(rendering, as_process) -> None:
    queues = {
        argument.removeprefix("--queue=")
        for pod in rendering.workers()
        for argument in pod.main["args"]
        if argument.startswith("--queue=")
    }
    partitions = {p.owner["metadata"]["labels"]["inferq-partition"] for p in rendering.workers()}
    for pod in (pod for pod in rendering.pods if pod.component == "tasks"):
        environment = as_process(pod.main)
        settings = tasks_settings(pod.main)
        assert set(settings.queues) == queues
        assert settings.partitions == len(partitions)
        assert settings.health_port == pod.main["ports"][0]["containerPort"]
        assert settings.health_host is None
        assert pod.spec["terminationGracePeriodSeconds"] > settings.shutdown_timeout_s + 5
        assert set(environment) <= {"INFERQ_REDIS_URL", *FOR_URLS, *GIVEN, *STORAGE}
        assert urlsplit(environment["INFERQ_REDIS_URL"]).username == "tasks"


def test_tasks_find_what_signs_in_a_file_that_is_mounted(helm4, as_process) -> None:
    [pod] = [pod for pod in helm4.scenario("webhooks").pods if pod.component == "tasks"]
    as_process(pod.main)
    settings = tasks_settings(pod.main)
    [mount] = [m for m in pod.main["volumeMounts"] if m["name"] == "webhooks"]
    assert str(settings.webhook_secrets_file) == f"{mount['mountPath']}/secrets.json"
    # a subPath would never see a secret that is replaced
    assert mount == {"name": "webhooks", "mountPath": "/etc/inferq/webhooks", "readOnly": True}
    assert settings.webhook_retry_delays_s == (5, 60.5, 3600)
    assert settings.webhook_allowed_networks == ("10.1.0.0/16", "fd00:1::/64")
    assert (settings.workers, settings.webhook_host_rate) == (4, 50)
    assert settings.webhook_secrets is None
    assert pod.owner["spec"]["replicas"] == 2


def test_gateways_take_webhooks_where_tasks_deliver_them(rendering, as_process) -> None:
    delivers = False
    for pod in (pod for pod in rendering.pods if pod.component == "tasks"):
        as_process(pod.main)
        delivers = tasks_settings(pod.main).webhook_secrets_file is not None
    for pod in (pod for pod in rendering.pods if pod.component == "gateway"):
        as_process(pod.main)
        assert gateway_settings(pod.main).accept_webhooks == delivers


def gateway_settings(container: Mapping[str, Any]) -> GatewaySettings:
    program, *arguments = container["args"]
    assert program == "gateway"
    given = vars(gateway_command.build_parser().parse_args(arguments))
    return gateway_command.read_settings(given)


def test_gateways_and_tasks_keep_batches_in_one_place(rendering, as_process) -> None:
    has_batches = set()
    for pod in (pod for pod in rendering.pods if pod.component in ("gateway", "tasks")):
        as_process(pod.main)
        read = gateway_settings if pod.component == "gateway" else tasks_settings
        settings = read(pod.main)
        mounts = [m for m in pod.main["volumeMounts"] if m["name"] == "batches"]
        assert [m["mountPath"] for m in mounts] == [
            folder for folder in [settings.batch_storage] if folder and folder.startswith("/")
        ]
        assert not any(mount.get("readOnly") for mount in mounts)
        claims = [v for v in pod.spec["volumes"] if v["name"] == "batches"]
        has_batches.add(
            (
                settings.batch_storage,
                settings.batch_storage_endpoint,
                settings.batch_file_age_s if settings.batch_storage else None,
                str(claims),
            )
        )
    assert len(has_batches) <= 1


def test_batches_in_a_bucket_have_its_address_and_a_login_by_reference(helm4, as_process) -> None:
    for pod in helm4.scenario("batches").pods:
        names = {variable["name"] for variable in pod.main.get("env", ())}
        if pod.component not in ("gateway", "tasks"):
            assert names.isdisjoint(STORAGE)
            continue
        environment = as_process(pod.main)
        read = gateway_settings if pod.component == "gateway" else tasks_settings
        settings = read(pod.main)
        assert settings.batch_storage == "s3://inferq-batches/llm"
        assert settings.batch_storage_endpoint == "http://minio.data:9000"
        assert settings.batch_file_age_s == 604_800
        assert environment["AWS_DEFAULT_REGION"] == "eu-central-1"
        assert environment["AWS_SECRET_ACCESS_KEY"] == SECRET


def test_batches_on_a_volume_outlive_the_release(helm4) -> None:
    rendering = helm4.scenario("webhooks")
    claim = rendering.named("PersistentVolumeClaim", "-batches")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in rendering.pods
        for volume in pod.spec.get("volumes", ())
        if volume["name"] == "batches"
    }
    assert claims == {claim["metadata"]["name"]}


@pytest.mark.parametrize(
    ("scenario", "endpoint"),
    [
        ("metrics", "http://collector.monitoring:4318"),
        ("batches", "https://otlp.example.com"),
        ("minimal", None),
    ],
)
def test_every_process_sends_its_traces_to_the_collector(
    helm4, as_process, scenario: str, endpoint: str | None
) -> None:
    readers = {"worker": worker_settings, "gateway": gateway_settings, "tasks": tasks_settings}
    for pod in helm4.scenario(scenario).pods:
        if pod.component in readers:
            as_process(pod.main)
            assert readers[pod.component](pod.main).tracing_endpoint == endpoint


def test_tasks_and_gateways_run_one_image(helm4) -> None:
    images = {
        pod.component: pod.main["image"]
        for pod in helm4.scenario("webhooks").pods
        if pod.component != "valkey"
    }
    assert images["tasks"] == images["gateway"] == images["test"] != images["worker"]


def test_a_flag_arrives_as_what_was_written(helm4, as_process) -> None:
    [pod] = helm4.scenario("tensor-parallel").workers()
    as_process(pod.main)
    settings = worker_settings(pod.main)
    assert settings.kv_cache_memory == 21_474_836_480
    assert settings.gpu_memory_utilization == 0.95
    assert settings.tensor_parallel_size == 2
    assert pod.main["resources"]["limits"]["nvidia.com/gpu"] == "2"
    [pod] = [p for p in helm4.scenario("several-pools").workers() if p.name.endswith("-small")]
    as_process(pod.main)
    settings = worker_settings(pod.main)
    assert (settings.device, settings.quantization) == ("cpu", "int8")
    assert settings.enable_prefix_caching is False
    assert "nvidia.com/gpu" not in str(pod.main["resources"])
    [pod] = helm4.scenario("lora").workers()
    as_process(pod.main)
    adapters = {"polite": "/adapters/polite", "legal/terse": "/adapters/terse"}
    assert worker_settings(pod.main).lora_adapters == adapters


@pytest.mark.parametrize(
    ("scenario", "url"),
    [
        ("minimal", f"redis://worker:{SECRET}@release-inferq-valkey:6379/0"),
        (
            "tls-acl",
            f"rediss://worker:{SECRET}@redis.data.svc.cluster.local:6380/2"
            "?ssl_ca_certs=/etc/inferq/redis-ca/ca.crt",
        ),
        (
            "cluster-partitions",
            f"redis+cluster://worker:{SECRET}@redis-0.redis.data:6379,redis-1.redis.data:6379",
        ),
        (
            "sentinel",
            f"redis+sentinel://worker:{SECRET}@sentinel-0.redis.data:26379,"
            f"sentinel-1.redis.data:26379/inferq/0?sentinel_password={SECRET}",
        ),
    ],
)
def test_the_url_says_where_the_server_is(helm4, scenario: str, url: str) -> None:
    for pod in helm4.scenario(scenario).workers():
        given = environment_of(pod.main)["INFERQ_REDIS_URL"]
        assert given == url
        ServerUrl.parse(given)


def test_probes_ask_paths_that_the_processes_serve(rendering) -> None:
    served = {
        "worker": set(WorkerProbes.__new__(WorkerProbes).checks),
        "gateway": {route.path for route in gateway_health.router.routes},
        "tasks": {"/livez", "/readyz"},  # test_bundled_server.py asks a process for them
    }
    for pod in rendering.pods:
        if pod.component not in served:
            continue
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert pod.main[probe]["httpGet"]["path"] in served[pod.component]
        assert pod.main["livenessProbe"]["httpGet"]["path"] == "/livez"
        assert pod.main["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_the_health_port_is_the_one_that_is_probed(rendering, as_process) -> None:
    for pod in rendering.workers():
        as_process(pod.main)
        [port] = pod.main["ports"]
        assert worker_settings(pod.main).health_port == port["containerPort"]


def test_a_worker_has_time_to_drain_and_hand_over(rendering, as_process) -> None:
    for pod in rendering.workers():
        as_process(pod.main)
        needs = worker_settings(pod.main).drain_timeout_s
        needs += 2 * worker_service.HAND_OVER_S + worker_service.CLAIM_END_S + STOP_TIMEOUT_S
        assert pod.spec["terminationGracePeriodSeconds"] > needs


def test_a_gateway_has_time_to_end(rendering, as_process) -> None:
    for pod in (pod for pod in rendering.pods if pod.component == "gateway"):
        as_process(pod.main)
        given = vars(gateway_command.build_parser().parse_args(pod.main["args"][1:]))
        settings = gateway_command.read_settings(given)
        needs = settings.shutdown_delay_s + settings.shutdown_timeout_s
        assert pod.spec["terminationGracePeriodSeconds"] > needs + 5


def test_a_worker_may_load_for_as_long_as_an_update_waits(rendering) -> None:
    for pod in rendering.workers():
        probe = pod.main["startupProbe"]
        load_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert load_s >= 1800
        assert pod.owner["spec"]["progressDeadlineSeconds"] > load_s


def test_folders_that_the_processes_write_are_volumes(rendering) -> None:
    for pod in rendering.workers():
        mounts = {mount["mountPath"] for mount in pod.main["volumeMounts"]}
        environment = environment_of(pod.main)
        for name in ("HOME", "HF_HOME", "INFERQ_CACHE", "TRITON_CACHE_DIR"):
            assert any(environment[name].startswith(mount) for mount in mounts), name


def test_the_helm_test_is_a_program_that_asks_every_model(rendering) -> None:
    for manifest in rendering.of_kind("Pod"):
        assert manifest["metadata"]["annotations"]["helm.sh/hook"] == "test"
        [container] = manifest["spec"]["containers"]
        ast.parse(container["command"][2])
        environment = environment_of(container)
        read = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', container["command"][2]))
        assert read | {"INFERQ_REDIS_URL", "INFERQ_PARTITIONS"} >= set(environment) - FOR_URLS
        queues = {
            argument.removeprefix("--queue=")
            for pod in rendering.workers()
            for argument in pod.main["args"]
            if argument.startswith("--queue=")
        }
        assert set(ast.literal_eval(environment["MODELS"])) == queues
