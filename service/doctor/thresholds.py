"""Every figure that decides between ok, a warning and a problem, and where it comes from."""

from __future__ import annotations

SLOW_NODE_BYTES_PER_S = 1e9
"""Reads within a node. CMA is a copy by the kernel: one core of a two-core virtual machine does 3 GB/s. Reads that
UCX emulates over TCP on the loopback do 0.6 to 1.1 GB/s there, and were reported at 0.3 (ai-dynamo/nixl issue 1754)."""

SLOW_NETWORK_BYTES_PER_S = 1e9
"""Reads between nodes. What 10 Gb/s Ethernet carries; at less, one billion parameters in bfloat16 take over 2 s."""

LEAST_RDMA_SHARE = 0.5
"""Of the slower node's fastest port. One queue pair fills most of a port with large reads; half of it means another
port, a slow PCIe slot or a congested fabric."""

LEAST_MEMLOCK_BYTES = 512 << 20
"""UCX does not use InfiniBand transports below it (openucx/ucx pull request 8085)."""

CLOCK_SKEW_S = 0.1
"""`lag_seconds` and event times of different nodes are compared by wall clock; NTP keeps nodes within milliseconds."""

LEAST_OPEN_FILES = 4096
"""Ray itself warns below it, and recommends 8192."""

LEAST_SHARED_MEMORY_BYTES = 1 << 30
"""What has to be left for export rings and mirrors: with a look-ahead of 1 a rank exports two decoder layers, and one
of an 8 billion parameter model has 0.4 GB in bfloat16."""

DOCKER_SHARED_MEMORY_BYTES = 64 << 20
"""What a container gets unless told otherwise."""

UNRELEASED_ON_ROCM = 1024
"""What `actors/nixl_package.py` sets where nothing is set."""

SERVICE_ANSWER_S = 2.0
"""A registry answers in milliseconds."""

ALL_PAIRS_NODES = 8
"""Up to 64 pairs are measured, in about a second each; with more nodes each is read by its neighbour in a ring."""

MEASURED_BYTES = 64 << 20
"""Registered on either side. Larger than caches share, small beside any model."""
