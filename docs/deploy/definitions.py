"""A pipeline on a KubeRay cluster that Dagster's runs share. A part of docs/guides/deploying.md."""

import dagster as dg
from dagster_ray.kuberay import KubeRayCluster
from dagster_ray.kuberay.configs import ClusterSharing, RayClusterConfig, RayClusterSpec

import vane_dagster as vd

CPUS = {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"cpu": "4", "memory": "16Gi"}}
GPU = {**CPUS, "limits": {**CPUS["limits"], "nvidia.com/gpu": "1"}}

spot = {
    "groupName": "spot-gpus",
    "replicas": 0,
    "minReplicas": 0,
    "maxReplicas": 8,
    "rayStartParams": {},
    "template": {
        "spec": {
            # On SIGTERM a Ray node drains for up to 30 s; Kubernetes must not kill it before.
            "terminationGracePeriodSeconds": 90,
            "containers": [
                {
                    "name": "worker",
                    "resources": GPU,
                    "env": [{"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "75"}],
                }
            ],
            "nodeSelector": {"node-lifecycle": "spot"},
            "tolerations": [{"key": "node-lifecycle", "value": "spot", "effect": "NoSchedule"}],
        }
    },
}
head = {  # on a node that the cloud does not take back
    "rayStartParams": {"num-cpus": "0"},
    "template": {"spec": {"containers": [{"name": "head", "resources": CPUS}]}},
}
cluster = KubeRayCluster(
    image="registry.example.com/vane-dagster:1",
    ray_cluster=RayClusterConfig(
        metadata={"namespace": "ray"},
        spec=RayClusterSpec(
            enable_in_tree_autoscaling=True, head_group_spec=head, worker_group_specs=[spot]
        ),
    ),
    cluster_sharing=ClusterSharing(enabled=True, ttl_seconds=1800),
)

docs = vd.Pipeline(
    "docs",
    source=vd.parquet("s3://lake/docs/{partition_key}/*.parquet"),
    id="id",
    partitions_def=dg.DailyPartitionsDefinition("2026-01-01"),
    pool="search-gpus",
)
docs.embed("embedding", "text", model="all-MiniLM-L6-v2", concurrency=(1, 4), gpus=1)

defs = dg.Definitions(
    assets=[docs.build_assets()],
    resources={
        "compute": vd.RayCompute(cluster=cluster),
        "store": vd.FragmentStore(root="s3://lake/.vane"),
    },
)
