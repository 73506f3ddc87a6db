"""Write a run as a PyTorchJob of Kubeflow's training operator: one pod per node, with the run file mounted in each."""

from __future__ import annotations

from typing import Any

import yaml

from megatron_pipemem.tools.config.loading import settings_of, write_yaml
from megatron_pipemem.tools.config.runs import Run
from megatron_pipemem.tools.launch.command import ranks_per_node

_NAME = "pretrain-gpt"
_FOLDER = "/etc/pipemem"
# The operator gives every pod MASTER_ADDR, MASTER_PORT and RANK, its own number from 0. torchrun sets RANK of the ranks.
_START = f"export NODE_RANK=$RANK; unset RANK WORLD_SIZE; exec pipemem launch {_FOLDER}/run.yaml --nodes"


def manifest(run: Run, nodes: int, image: str) -> list[dict[str, Any]]:
    """Return a ConfigMap with the run file, and a PyTorchJob that trains the run.

    Relative paths of the run, such as ``output``, are on the claim ``pipemem``, which all pods mount as their working
    folder. Raise a ConfigError if the ranks cannot be shared evenly by the nodes.
    """
    configuration = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _NAME},
        "data": {"run.yaml": write_yaml(settings_of(run))},
    }
    replicas = {"Master": 1, **({"Worker": nodes - 1} if nodes > 1 else {})}
    pod = {"spec": _pod(run, nodes, image)}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": _NAME},
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 3},
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "OnFailure", "template": pod}
                for kind, count in replicas.items()
            },
        },
    }
    return [configuration, job]


def as_yaml(documents: list[dict[str, Any]]) -> str:
    """Return the documents as ``kubectl apply -f -`` reads them."""
    return yaml.dump_all(documents, Dumper=_ManifestDumper, sort_keys=False, width=120)


def _pod(run: Run, nodes: int, image: str) -> dict[str, Any]:
    gpus = {} if run.on_cpu else {"resources": {"limits": {"nvidia.com/gpu": ranks_per_node(run, nodes)}}}
    mounts = {"run": _FOLDER, "work": "/workspace", "shm": "/dev/shm"}
    container = {
        "name": "pytorch",  # the name that the operator looks for
        "image": image,
        "workingDir": mounts["work"],
        "command": ["bash", "-c", f"{_START} {nodes}"],
        **gpus,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    return {
        "containers": [container],
        "volumes": [
            {"name": "run", "configMap": {"name": _NAME}},
            {"name": "work", "persistentVolumeClaim": {"claimName": "pipemem"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


class _ManifestDumper(yaml.SafeDumper):
    """Writes texts with several lines as they are, and no anchors for the pods, which are equal."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_ManifestDumper.add_representer(str, _text)
