"""A small model on two nodes of four devices: of what planning is tested with."""

from __future__ import annotations

from megatron_pipemem.model.model import Model
from megatron_pipemem.tools.config.cluster import Cluster, HostChannel, Link
from megatron_pipemem.tools.config.runs import Parallelism, Run

MODEL = Model(layers=8, hidden=2048, heads=16, vocabulary=32000, sequence=1024)
CLUSTER = Cluster(
    memory_gib=24.0,
    tflops=300.0,
    intra_node=Link(200.0),
    inter_node=Link(20.0),
    host=HostChannel(20.0, 20.0),
    host_memory_gib=500.0,
    nodes=2,
    devices_per_node=4,
)
RUN = Run(MODEL, CLUSTER, Parallelism(global_batch=16))
FAMILIES = ("1f1b", "interleaved", "zb-h1", "gis-h", "zbv", "v-half", "v-min", "1f1b-v")
