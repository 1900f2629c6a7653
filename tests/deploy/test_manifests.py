"""The manifests are what their schemas and our own code accept, and name files and things that exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from weightsync.service.serving import Application
from weightsync.service.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = "1.31"


def load(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(path.read_text())
    return read


@pytest.fixture(scope="module")
def rayservice() -> dict[str, Any]:
    return load(DEPLOY / "kuberay" / "rayservice.yaml")


def pod_templates(rayservice: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = rayservice["spec"]["rayClusterConfig"]
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_its_pods_are_pods_of_kubernetes(rayservice: dict[str, Any]) -> None:
    assert (rayservice["apiVersion"], rayservice["kind"]) == ("ray.io/v1", "RayService")
    templates = pod_templates(rayservice)
    assert len(templates) == 2
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, KUBERNETES, strict=True)
        mounts = {mount["name"] for c in template["spec"]["containers"] for mount in c["volumeMounts"]}
        assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}


def test_a_pod_with_a_wrong_field_would_be_noticed(rayservice: dict[str, Any]) -> None:
    spec = {**pod_templates(rayservice)[0]["spec"], "volumez": []}
    with pytest.raises(kubernetes_validate.utils.ValidationError):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, KUBERNETES, strict=True
        )


def test_it_deploys_our_application_where_tokens_are_needed_and_given(rayservice: dict[str, Any]) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(rayservice["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == "weightsync.service.serving:build"
    Settings(**Application(**application.args).settings)
    for template in pod_templates(rayservice):
        (container,) = template["spec"]["containers"]
        given = {variable["name"].removeprefix("WEIGHTSYNC_").lower() for variable in container["env"]}
        assert given == {"http_read_tokens", "http_operate_tokens"} <= set(Settings.model_fields)


def test_versions_agree_with_what_is_tested(rayservice: dict[str, Any]) -> None:
    assert rayservice["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__
    assert f"ARG RAY_VERSION={ray.__version__}\n" in (DEPLOY / "Containerfile").read_text()


def test_the_compose_file_follows_its_schema_and_mounts_what_exists() -> None:
    path = DEPLOY / "compose.yaml"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for service in load(path)["services"].values():
        for volume in service["volumes"]:
            assert (DEPLOY / volume.split(":")[0]).resolve().exists(), volume


def test_what_the_image_copies_is_there() -> None:
    copied = [
        name
        for line in (DEPLOY / "Containerfile").read_text().splitlines()
        if line.startswith("COPY")
        for name in line.split()[2:-1]
    ]
    assert "protocol" in copied
    assert all((DEPLOY.parent / name).exists() for name in copied)
