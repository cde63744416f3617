"""What deploy/ holds fits its schemas, the command line and itself. No cluster is needed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import typer
import yaml

from lockstep.cli import app
from lockstep.launch.vllm import command, environment
from lockstep.settings import Settings
from tests.deploy.files import (
    CHART,
    DEPLOY,
    HELM,
    SETS,
    command_lines,
    compose,
    of_kind,
    pods,
    render,
)

VERSIONS = ("1.29", "1.37")
CLI = typer.main.get_command(app)
LINES = command_lines()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SETS)
def test_every_object_of_the_chart_fits_its_schema(name: str, version: str) -> None:
    objects = [each for each in render(name) if each["kind"] != "ServiceMonitor"]
    assert len(objects) >= 9
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


def test_the_chart_passes_helms_own_checks_and_names_missing_secrets() -> None:
    lint = subprocess.run(
        [HELM, "lint", CHART, "--strict"], capture_output=True, text=True, timeout=60, check=False
    )
    assert lint.returncode == 0, lint.stdout
    trial = [HELM, "template", "x", CHART, "--set", "secrets.create=true"]
    refused = subprocess.run(trial, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert "set secrets.adminToken" in refused.stderr


@pytest.mark.parametrize("where", LINES)
def test_a_command_line_is_one_of_ours(where: str) -> None:
    name, *arguments = LINES[where]
    command = CLI.commands[name]  # type: ignore[attr-defined]
    with command.make_context(name, list(arguments), resilient_parsing=False) as context:
        assert context.params


def test_the_check_of_command_lines_sees_an_unknown_option() -> None:
    with pytest.raises(Exception, match="No such option"):
        CLI.commands["worker"].make_context("worker", ["tiny", "--no-such"])  # type: ignore[attr-defined]


def test_vllm_pods_start_what_lockstep_serve_starts(tmp_path: Path) -> None:
    (container,) = pods("vllm")["lockstep-worker"]["containers"]
    (model := tmp_path / "base").mkdir()
    parts = command("python3", str(model), "0.0.0.0:8100", (), cpu=False)
    ours = [part.replace(str(model), "/weights/base") for part in parts]
    assert container["command"] == ours[:3]
    assert container["args"][: len(ours) - 3] == ours[3:]
    assert container["args"][-6:-4] == ["--tensor-parallel-size", "2"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert environment({}, (), cpu=False).items() <= values.items()


def test_settings_in_secrets_and_compose_are_known() -> None:
    for secret in of_kind("cpu-trial", "Secret").values():
        pairs = secret["stringData"]
        Settings.read({name: v for name, v in pairs.items() if name.startswith("LOCKSTEP_")})
    for service in compose()["services"].values():
        names = [each for each in service.get("environment", {}) if each.startswith("LOCKSTEP_")]
        Settings.read(dict.fromkeys(names, "a-value-of-some-length"))


def test_every_secret_that_a_pod_reads_is_made_for_a_trial() -> None:
    made = set(of_kind("cpu-trial", "Secret"))
    for pod in pods("cpu-trial").values():
        for container in pod["containers"]:
            assert {each["secretRef"]["name"] for each in container["envFrom"]} <= made


def test_workers_do_not_get_the_gateways_admin_token() -> None:
    secrets = of_kind("cpu-trial", "Secret")
    gateway, worker = (secrets[f"lockstep-{part}"]["stringData"] for part in ("gateway", "worker"))
    assert gateway["LOCKSTEP_ADMIN_TOKEN"] not in worker.values()
    assert gateway["LOCKSTEP_WORKER_ADMIN_TOKEN"] == worker["LOCKSTEP_ADMIN_TOKEN"]
    services = compose()["services"]
    theirs = services["worker-0"]["environment"]["LOCKSTEP_ADMIN_TOKEN"]
    assert theirs == services["gateway-0"]["environment"]["LOCKSTEP_WORKER_ADMIN_TOKEN"]
    assert theirs != services["gateway-0"]["environment"]["LOCKSTEP_ADMIN_TOKEN"]


@pytest.mark.parametrize("name", SETS)
def test_gateways_discover_the_workers_of_the_headless_service(name: str) -> None:
    line = LINES[f"{name}: lockstep-gateway"]
    data, admin = line[line.index("--discover") + 1].split(",")
    service = of_kind(name, "Service")["lockstep-worker"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    ports = {f"http://lockstep-worker:{each['port']}" for each in service["ports"]}
    assert {data, admin} == ports
    assert "--worker" not in line


def test_compose_gateways_name_every_worker() -> None:
    in_compose = [name for name in compose()["services"] if name.startswith("worker-")]
    for gateway in ("compose gateway-0", "compose gateway-1"):
        line = LINES[gateway]
        named = [line[at + 1] for at, each in enumerate(line) if each == "--worker"]
        assert named == [f"http://{name}:8100,http://{name}:8101" for name in in_compose]


@pytest.mark.parametrize("name", SETS)
def test_a_pod_has_no_root_and_no_token_of_the_cluster(name: str) -> None:
    for pod in pods(name).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert own["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize(("name", "gpus", "shared"), [("gpu-node", 1, "2Gi"), ("vllm", 2, "16Gi")])
def test_workers_on_gpus_request_them_with_nodes_and_shared_memory(
    name: str, gpus: int, shared: str
) -> None:
    pod = pods(name)["lockstep-worker"]
    (container,) = pod["containers"]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["nvidia.com/gpu"] == gpus
        assert "memory" in container["resources"][kind]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["tolerations"]
    volume = next(each for each in pod["volumes"] if each["name"] == "shared-memory")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": shared}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    (cpu,) = pods("cpu-trial")["lockstep-worker"]["containers"]
    assert "nvidia.com/gpu" not in cpu["resources"]["limits"]


def test_a_gateway_serves_until_it_has_left_the_service_and_then_drains() -> None:
    pod = pods("cpu-trial")["lockstep-gateway"]
    (container,) = pod["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    drain = container["args"][container["args"].index("--drain-seconds") + 1]
    assert command == ["sleep", "15"]
    assert pod["terminationGracePeriodSeconds"] > int(command[1]) + int(drain)


def test_probes_leave_an_hour_for_a_large_model() -> None:
    (worker,) = pods("vllm")["lockstep-worker"]["containers"]
    probe = worker["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600
    (gateway,) = pods("vllm")["lockstep-gateway"]["containers"]
    wait = int(gateway["args"][gateway["args"].index("--wait-seconds") + 1])
    probe = gateway["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > wait >= 3600


def test_options_add_an_autoscaler_monitors_and_an_ingress() -> None:
    name = "external-postgres"
    scaler = of_kind(name, "HorizontalPodAutoscaler")["lockstep-worker"]["spec"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == "lockstep_worker_waiting"
    assert "replicas" not in of_kind(name, "StatefulSet")["lockstep-worker"]["spec"]
    services = of_kind(name, "Service")
    for part, monitor in of_kind(name, "ServiceMonitor").items():
        labels = monitor["spec"]["selector"]["matchLabels"]
        assert labels.items() <= services[part]["metadata"]["labels"].items()
        assert monitor["spec"]["endpoints"][0]["port"] == "http"
    rule = of_kind(name, "Ingress")["lockstep-gateway"]["spec"]["rules"][0]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": "lockstep-gateway", "port": {"name": "http"}}
    both = of_kind("vllm on external-postgres", "HorizontalPodAutoscaler")["lockstep-worker"]
    assert both["spec"]["metrics"][0]["object"]["describedObject"]["name"] == "lockstep-gateway"
    for kind in ("HorizontalPodAutoscaler", "ServiceMonitor", "Ingress"):
        assert of_kind("cpu-trial", kind) == {}


@pytest.mark.parametrize("name", SETS)
def test_admin_ports_are_open_to_no_one_outside(name: str) -> None:
    for policy in of_kind(name, "NetworkPolicy").values():
        for rule in policy["spec"]["ingress"]:
            ports = {each["port"] for each in rule["ports"]}
            if ports & {8001, 8101, 5432} or (name.startswith("vllm") and 8100 in ports):
                assert rule["from"], "an admin port without a list of who may reach it"
                assert all("namespaceSelector" not in each for each in rule["from"])
    for service in of_kind(name, "Service").values():
        assert service["spec"].get("type", "ClusterIP") == "ClusterIP"


@pytest.mark.parametrize("name", SETS)
def test_pods_connect_to_nothing_outside_but_names_and_the_database(name: str) -> None:
    policies = of_kind(name, "NetworkPolicy")
    assert policies
    for policy in policies.values():
        assert "Egress" in policy["spec"]["policyTypes"]
        for rule in policy["spec"]["egress"]:
            if "to" not in rule:
                assert {each["port"] for each in rule["ports"]} == {53}
            elif any("ipBlock" in each for each in rule["to"]):
                assert [each["port"] for each in rule["ports"]] == [5432]


def test_compose_publishes_data_ports_on_loopback_only() -> None:
    published = [each for service in compose()["services"].values()
                 for each in service.get("ports", ())]  # fmt: skip
    assert published
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:(8000|9090)", each) for each in published)


@pytest.mark.parametrize("name", SETS)
def test_selectors_and_probes_name_what_is_there(name: str) -> None:
    labels = [
        each["spec"]["template"]["metadata"]["labels"].items()
        for kind in ("Deployment", "StatefulSet")
        for each in of_kind(name, kind).values()
    ]
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        for owner, each in of_kind(name, kind).items():
            spec = each["spec"]
            selector = spec.get("podSelector") or spec["selector"]
            wanted = selector.get("matchLabels", selector).items()
            assert any(wanted <= pod for pod in labels), (kind, owner)
    for owner, pod in pods(name).items():
        for container in pod["containers"]:
            ports = {port["name"] for port in container["ports"]}
            probes = [container[key] for key in container if key.endswith("Probe")]
            assert probes, owner
            for probe in probes:
                aim = probe.get("httpGet") or probe.get("tcpSocket")
                assert aim is None or aim["port"] in ports


def test_the_images_are_stages_of_the_dockerfile() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM .* AS (\S+)$", text, re.M))
    wanted = {each["build"]["target"] for each in compose()["services"].values() if "build" in each}
    assert wanted == {"gateway", "worker"}
    for name in SETS:
        for owner, pod in pods(name).items():
            image = pod["containers"][0]["image"].rpartition("/")[2]
            if owner != "lockstep-postgres":
                wanted.add(image.partition(":")[0].removeprefix("lockstep-"))
    assert wanted <= stages
    assert wanted == {"gateway", "worker", "worker-gpu", "vllm"}
    assert "USER 10001:10001" in text
    extras = yaml.safe_load("[" + ",".join(re.findall(r"'\.\[([\w,]+)\]'", text)) + "]")
    assert set(extras) <= {"postgres", "otel", "engine", "tinker"}


def test_the_image_for_gpus_has_the_compiler_that_triton_needs() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    stage = text[text.index("AS worker-gpu") :].partition("\nFROM ")[0]
    assert re.search(r"apt-get install .*\bgcc\b.*\blibc6-dev\b", stage)


def test_no_image_floats() -> None:
    images = [each["image"] for each in compose()["services"].values() if "build" not in each]
    images += [
        container["image"] for name in SETS for pod in pods(name).values()
        for container in pod["containers"]
    ]  # fmt: skip
    images += re.findall(r"^ARG \w+_IMAGE=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    for image in images:
        tag = image.rpartition("/")[2].partition(":")[2]
        assert re.match(r"v?\d+\.\d+", tag), f"{image} has no exact tag"
