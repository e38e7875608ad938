"""The RayJob: pods and volumes against Kubernetes' schemas, the rest against the fields of KubeRay's types.

`FIELDS` was written from KubeRay's Go types (ray-operator/apis/ray/v1, RayJobSpec and RayClusterSpec) and its
reference of `authOptions`; the CRD itself is not here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import ray
import yaml

FILE = Path(__file__).parents[2] / "deploy" / "kuberay-rayjob.yaml"
KUBERNETES = "1.31"


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    claim, job = yaml.safe_load_all(FILE.read_text())
    return claim, job


def pods(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    yield job["spec"]["submitterPodTemplate"]
    yield cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["template"]


def test_volume_and_pods_are_what_kubernetes_knows() -> None:
    claim, job = documents()
    kubernetes_validate.validate(claim, KUBERNETES, strict=True)
    templates = list(pods(job))
    assert len(templates) == 4
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_nobody_is_root_and_everything_is_bounded() -> None:
    """What the `restricted` level of Kubernetes' pod security standards asks for."""
    for template in pods(documents()[1]):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        (container,) = spec["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]) == set(container["resources"]["limits"])


def test_all_nodes_share_the_volume_and_the_versions_of_the_image() -> None:
    claim, job = documents()
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token"}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    names = {container["image"] for template in pods(job) for container in template["spec"]["containers"]}
    assert len(names) == 1
    for template in list(pods(job))[1:]:
        (mount,), (volume,) = template["spec"]["containers"][0]["volumeMounts"], template["spec"]["volumes"]
        assert mount == {"name": volume["name"], "mountPath": "/shared"}
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    program, *paths = job["spec"]["entrypoint"].split()
    assert (FILE.parent / program).is_file()
    assert [path.startswith("/shared/") for path in paths[:2]] == [True, True]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
