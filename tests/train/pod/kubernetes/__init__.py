"""The part of the Kubernetes client that `jax.distributed` calls, for a pod of the indexed Job `train` of two pods."""

from __future__ import annotations

import os
from types import SimpleNamespace as Record
from typing import Any

POD = Record(
    metadata=Record(
        name=os.environ.get("HOSTNAME"),
        labels={"job-name": "train"},
        owner_references=[Record(controller=True, kind="Job")],
    ),
    spec=Record(subdomain="jaxpods"),
)
JOB = Record(metadata=Record(name="train", labels={"job-name": "train"}), spec=Record(parallelism=2))


class ApiException(Exception):  # noqa: N818 - the library's name
    status, reason = 403, "Forbidden"


class CoreV1Api:
    def list_namespaced_pod(self, namespace: str, field_selector: str) -> Any:
        if namespace != "team" or field_selector != "status.podIP=127.0.0.1":
            raise ApiException
        return Record(items=[POD])


class BatchV1Api:
    def read_namespaced_job(self, name: str, namespace: str) -> Any:
        if (name, namespace) != ("train", "team"):
            raise ApiException
        return JOB


config = Record(load_incluster_config=lambda: None)
client = Record(CoreV1Api=CoreV1Api, BatchV1Api=BatchV1Api, exceptions=Record(ApiException=ApiException))
