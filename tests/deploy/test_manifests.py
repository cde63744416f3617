"""What deploy/ holds fits its schemas, the command line and itself. No cluster is needed."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from lockstep.cli import app
from lockstep.settings import Settings
from tests.deploy.files import (
    DEPLOY,
    KUBERNETES,
    command_lines,
    compose,
    documents,
    manifests,
    of_kind,
)

VERSIONS = ("1.29", "1.37")
CLI = typer.main.get_command(app)
PODS = [(name, each["spec"]["template"]["spec"]) for kind in ("Deployment", "StatefulSet")
        for name, each in of_kind(kind).items()]  # fmt: skip
LINES = command_lines()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("file", "each"), manifests(), ids=lambda part: str(part)[:24])
def test_a_manifest_fits_its_schema(file: str, each: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("where", LINES)
def test_a_command_line_is_one_of_ours(where: str) -> None:
    name, *arguments = LINES[where]
    command = CLI.commands[name]  # type: ignore[attr-defined]
    with command.make_context(name, list(arguments), resilient_parsing=False) as context:
        assert context.params


def test_the_check_of_command_lines_sees_an_unknown_option() -> None:
    with pytest.raises(Exception, match="No such option"):
        CLI.commands["worker"].make_context("worker", ["tiny", "--no-such"])  # type: ignore[attr-defined]


def test_every_file_of_a_kustomization_is_there_and_named_once() -> None:
    for path in KUBERNETES.rglob("kustomization.yaml"):
        resources = documents(path)[0]["resources"]
        assert len(set(resources)) == len(resources)
        assert all((path.parent / each).exists() for each in resources)
        beside = {each.name for each in path.parent.glob("*.yaml")} - {path.name}
        assert beside <= set(resources), f"{path} leaves files out"


def test_settings_in_secrets_and_compose_are_known() -> None:
    overlay = documents(KUBERNETES / "overlays/trial/kustomization.yaml")[0]
    for secret in overlay["secretGenerator"]:
        pairs = dict(each.split("=", 1) for each in secret["literals"])
        Settings.read({name: v for name, v in pairs.items() if name.startswith("LOCKSTEP_")})
    for service in compose()["services"].values():
        names = [each for each in service.get("environment", {}) if each.startswith("LOCKSTEP_")]
        Settings.read(dict.fromkeys(names, "a-value-of-some-length"))


def test_every_secret_that_a_pod_reads_is_made_by_the_overlay() -> None:
    overlay = documents(KUBERNETES / "overlays/trial/kustomization.yaml")[0]
    made = {each["name"] for each in overlay["secretGenerator"]}
    for _, pod in PODS:
        for container in pod["containers"]:
            assert {each["secretRef"]["name"] for each in container["envFrom"]} <= made


def test_gateways_name_every_worker_of_the_set() -> None:
    replicas = of_kind("StatefulSet")["lockstep-worker"]["spec"]["replicas"]
    line = LINES["Deployment lockstep-gateway"]
    named = [line[at + 1] for at, each in enumerate(line) if each == "--worker"]
    assert named == [
        f"http://lockstep-worker-{n}.lockstep-worker:8100,http://lockstep-worker-{n}.lockstep-worker:8101"
        for n in range(replicas)
    ]
    in_compose = [name for name in compose()["services"] if name.startswith("worker-")]
    for gateway in ("compose gateway-0", "compose gateway-1"):
        line = LINES[gateway]
        named = [line[at + 1] for at, each in enumerate(line) if each == "--worker"]
        assert named == [f"http://{name}:8100,http://{name}:8101" for name in in_compose]


@pytest.mark.parametrize(("name", "pod"), PODS)
def test_a_pod_has_no_root_and_no_token_of_the_cluster(name: str, pod: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        if container["image"].startswith("lockstep"):
            assert own["readOnlyRootFilesystem"] is True


def test_admin_ports_are_open_to_no_one_outside() -> None:
    for policy in of_kind("NetworkPolicy").values():
        for rule in policy["spec"]["ingress"]:
            ports = {each["port"] for each in rule["ports"]}
            if ports & {8001, 8101, 5432}:
                assert rule["from"], "an admin port without a list of who may reach it"
                assert all("namespaceSelector" not in each for each in rule["from"])
    for service in of_kind("Service").values():
        assert service["spec"].get("type", "ClusterIP") == "ClusterIP"
    published = [each for service in compose()["services"].values()
                 for each in service.get("ports", ())]  # fmt: skip
    assert published
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:(8000|9090)", each) for each in published)


def test_selectors_and_probes_name_what_is_there() -> None:
    labels = {
        frozenset(each["spec"]["template"]["metadata"]["labels"].items())
        for kind in ("Deployment", "StatefulSet")
        for each in of_kind(kind).values()
    }
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        for name, each in of_kind(kind).items():
            spec = each["spec"]
            chosen = spec.get("podSelector") or spec["selector"]
            assert frozenset(chosen.get("matchLabels", chosen).items()) in labels, (kind, name)
    for name, pod in PODS:
        for container in pod["containers"]:
            ports = {port["name"] for port in container["ports"]}
            probes = [container[key] for key in container if key.endswith("Probe")]
            assert probes, name
            for probe in probes:
                aim = probe.get("httpGet") or probe.get("tcpSocket")
                assert aim is None or aim["port"] in ports


def test_the_images_are_stages_of_the_dockerfile() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM .* AS (\S+)$", text, re.M))
    wanted = {each["build"]["target"] for each in compose()["services"].values() if "build" in each}
    assert wanted == {"gateway", "worker"} & stages
    assert "USER 10001:10001" in text
    extras = yaml.safe_load("[" + ",".join(re.findall(r"'\.\[([\w,]+)\]'", text)) + "]")
    assert set(extras) <= {"postgres", "otel", "engine", "tinker"}
