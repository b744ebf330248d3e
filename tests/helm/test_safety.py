"""What keeps pods harmless: no root, no token, no secret where it could be read."""

from __future__ import annotations

import base64


def test_every_pod_meets_the_restricted_standard(rendering) -> None:
    for pod in rendering.pods:
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        container = pod.main["securityContext"]
        assert container["allowPrivilegeEscalation"] is False
        assert container["readOnlyRootFilesystem"] is True
        assert container["capabilities"] == {"drop": ["ALL"]}
        assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod.spec)


def test_no_pod_gets_a_token_or_the_services_variables(rendering) -> None:
    for pod in rendering.pods:
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["enableServiceLinks"] is False
    for account in rendering.of_kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    assert rendering.of_kind("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding") == []


def test_passwords_stand_in_secrets_alone(helm4) -> None:
    rendering = helm4.scenario("scale-to-zero")
    [secret] = rendering.of_kind("Secret")
    passwords = [base64.b64decode(value).decode() for value in secret["data"].values()]
    assert len(passwords) == len(set(passwords)) == 4
    assert all(len(password) == 40 and password.isalnum() for password in passwords)
    assert all(rendering.text.count(password) == 0 for password in passwords)


def test_secrets_come_by_reference_and_never_in_arguments(rendering) -> None:
    for pod in rendering.pods:
        words = " ".join([*pod.main.get("args", ()), *pod.main.get("command", ())])
        assert "PASSWORD)" not in words
        assert "TOKEN" not in words
        for variable in pod.main.get("env", ()):
            if any(part in variable["name"] for part in ("PASSWORD", "TOKEN")):
                assert "secretKeyRef" in variable["valueFrom"], variable["name"]


def test_the_images_have_a_tag_or_a_digest_and_never_latest(rendering) -> None:
    for pod in rendering.pods:
        repository, _, tag = pod.main["image"].rpartition(":")
        assert repository
        assert tag not in ("", "latest")


def test_network_policies_let_out_only_to_names_the_server_and_downloads(helm4) -> None:
    rendering = helm4.scenario("no-gateway")
    policy = rendering.named("NetworkPolicy", "-worker")
    assert policy["spec"]["ingress"] == []
    ports = [[port["port"] for port in rule["ports"]] for rule in policy["spec"]["egress"]]
    assert ports == [[53, 53], [6379]]
    assert rendering.named("NetworkPolicy", "-valkey")["spec"]["egress"] == []
    policy = helm4.scenario("tls-acl").named("NetworkPolicy", "-worker")
    ports = [[port["port"] for port in rule["ports"]] for rule in policy["spec"]["egress"]]
    assert ports == [[53, 53], [6380], [443]]


def test_tasks_may_go_to_the_ports_of_webhooks_and_nobody_may_come_to_them(helm4) -> None:
    rendering = helm4.scenario("webhooks")
    policy = rendering.named("NetworkPolicy", "-tasks")
    assert policy["spec"]["ingress"] == []
    ports = [[port["port"] for port in rule["ports"]] for rule in policy["spec"]["egress"]]
    assert ports == [[53, 53], [6379], [443, 8443]]
    assert "to" not in policy["spec"]["egress"][2]
    policy = rendering.named("NetworkPolicy", "-gateway")
    ports = [[port["port"] for port in rule["ports"]] for rule in policy["spec"]["egress"]]
    assert ports == [[53, 53], [6379]]


def test_files_of_batches_and_traces_have_ways_out_of_those_who_send_them(helm4) -> None:
    rendering = helm4.scenario("batches")
    for component, own in (("worker", [443]), ("gateway", [9000]), ("tasks", [443, 9000])):
        policy = rendering.named("NetworkPolicy", f"-{component}")
        ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]
        assert ports == [53, 53, 6379, *own, 443]  # the last is the collector's
    policy = helm4.scenario("metrics").named("NetworkPolicy", "-gateway")
    ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 6379, 4318]


def test_metrics_are_for_whom_they_are_meant_on_a_port_of_their_own(helm4) -> None:
    rendering = helm4.scenario("metrics")
    monitoring = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]
    for component, port in (("worker", "health"), ("gateway", "metrics"), ("tasks", "health")):
        rules = rendering.named("NetworkPolicy", f"-{component}")["spec"]["ingress"]
        [rule] = [r for r in rules if r["ports"] == [{"protocol": "TCP", "port": port}]]
        assert rule["from"] == monitoring
    [service] = [
        s for s in rendering.of_kind("Service") if s["metadata"]["name"].endswith("-gateway")
    ]
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]


def test_only_tasks_see_what_signs_webhooks(helm4) -> None:
    for pod in helm4.scenario("webhooks").pods:
        volumes = pod.spec.get("volumes", ())
        secrets = {volume.get("secret", {}).get("secretName") for volume in volumes}
        assert ("inferq-webhooks" in secrets) == (pod.component == "tasks")


def test_whoever_needs_the_bundled_server_may_reach_it(helm4) -> None:
    assert peers_of_the_server(helm4.scenario("webhooks")) == {"worker", "gateway", "tasks", "test"}
    rendering = helm4.scenario("every-option")
    [rule] = rendering.named("NetworkPolicy", "-valkey")["spec"]["ingress"]
    assert peers_of_the_server(rendering) == {"worker", "gateway", "test"}
    namespaces = [peer["namespaceSelector"] for peer in rule["from"] if "namespaceSelector" in peer]
    assert namespaces == [{"matchLabels": {"kubernetes.io/metadata.name": "scaling"}}]


def peers_of_the_server(rendering) -> set[str]:
    [rule] = rendering.named("NetworkPolicy", "-valkey")["spec"]["ingress"]
    return {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for peer in rule["from"]
        if "podSelector" in peer
    }
