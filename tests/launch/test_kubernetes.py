"""The manifest of a run: the requirements of Kubernetes and of Kubeflow's training operator, and the run in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from commands import pipemem
from refusals import check_refusal

from megatron_pipemem.tools.config.loading import load
from megatron_pipemem.tools.config.runs import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "kubernetes.yaml"
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
COUNT = {"type": "integer", "minimum": 1}
MOUNT = {
    "required": ["name", "mountPath"],
    "properties": {"name": NAME, "mountPath": {"type": "string", "pattern": "^/"}},
    "additionalProperties": False,
}
CONTAINER = {
    "required": ["name", "image", "command"],
    "properties": {
        "name": {"const": "pytorch"},
        "image": {"type": "string", "minLength": 1},
        "workingDir": {"type": "string", "pattern": "^/"},
        "command": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "resources": {"properties": {"limits": {"additionalProperties": COUNT}}, "additionalProperties": False},
        "volumeMounts": {"type": "array", "items": MOUNT},
    },
    "additionalProperties": False,
}
VOLUME = {
    "required": ["name"],
    "properties": {"name": NAME, "configMap": {}, "persistentVolumeClaim": {}, "emptyDir": {}},
    "minProperties": 2,
    "maxProperties": 2,
    "additionalProperties": False,
}
POD = {
    "required": ["containers"],
    "properties": {
        "containers": {"type": "array", "items": CONTAINER, "minItems": 1},
        "volumes": {"type": "array", "items": VOLUME},
    },
    "additionalProperties": False,
}
REPLICAS = {
    "required": ["replicas", "restartPolicy", "template"],
    "properties": {
        "replicas": COUNT,
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": {"properties": {"spec": POD}, "additionalProperties": False},
    },
    "additionalProperties": False,
}
JOB = {
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {"required": ["name"], "properties": {"name": NAME}},
        "spec": {
            "required": ["pytorchReplicaSpecs"],
            "properties": {
                "runPolicy": {
                    "properties": {"cleanPodPolicy": {"enum": ["Running", "All", "None"]}, "backoffLimit": COUNT},
                    "additionalProperties": False,
                },
                "pytorchReplicaSpecs": {
                    "required": ["Master"],
                    "properties": {"Master": REPLICAS, "Worker": REPLICAS},
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
    },
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
}
"""The part of the operator's schema that a manifest of ours uses."""


def manifest(*words: object) -> str:
    done = pipemem("launch", *words, "--launcher", "kubernetes", "--print")
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_the_example_is_what_the_command_prints():
    shown = manifest("llama3-70b-64xh100", "--image", "registry.example/pipemem:0.1.0")
    comment, _, rest = EXAMPLE.read_text(encoding="utf-8").partition("\n")
    assert comment.startswith("# pipemem launch llama3-70b-64xh100 ") and rest == shown


@pytest.mark.parametrize(("run", "nodes"), [("llama3-70b-64xh100", 8), ("llama3-8b-8xh100", 1), ("tiny-cpu", 1)])
def test_a_pod_per_node_has_the_run_and_its_devices(run, nodes, tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    configuration, job = yaml.safe_load_all(manifest(run))
    jsonschema.validate(job, JOB)
    path = tmp_path / "run.yaml"
    path.write_text(configuration["data"]["run.yaml"], encoding="utf-8")
    assert load(path, Run) == load(run, Run)
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert sum(spec["replicas"] for spec in specs.values()) == nodes and ("Worker" in specs) == (nodes > 1)
    (container,) = specs["Master"]["template"]["spec"]["containers"]
    assert container.get("resources") == (None if run == "tiny-cpu" else {"limits": {"nvidia.com/gpu": 8}})
    mounted = {volume["name"] for volume in specs["Master"]["template"]["spec"]["volumes"]}
    assert mounted == {mount["name"] for mount in container["volumeMounts"]}
    assert re.search(rf"pipemem launch /etc/pipemem/run.yaml --nodes {nodes}$", container["command"][-1])


def test_nothing_is_submitted():
    check_refusal(pipemem("launch", "tiny-cpu", "--launcher", "kubernetes").stderr, "needs-option", "--print")
