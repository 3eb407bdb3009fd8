"""A Ray cluster on this machine's loopback, of one or several nodes, until standard input closes. Prints its address.

Run as a program, so that a benchmark's clock starts when the cluster is warm: its processes wait for work.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time

_WARM_S = 120.0


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ray_cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=2, help="of each node")
    parser.add_argument("--store", type=int, default=400 << 20, help="bytes of each node's object store")
    given = parser.parse_args()
    # Read when ray is imported: listen on loopback, and send no statistics.
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    import ray
    from ray.cluster_utils import Cluster

    settings = {"num_cpus": given.cpus, "object_store_memory": given.store}
    cluster = Cluster(initialize_head=True, head_node_args={**settings, "include_dashboard": False})
    for _ in range(1, given.nodes):
        cluster.add_node(**settings)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    cluster.wait_for_nodes(_WARM_S)
    # A worker process for each CPU, as an idle cluster has: what runs first need not wait for their start.
    nap = ray.remote(num_cpus=1)(_sleep)
    ray.get([nap.remote(0.5) for _ in range(int(given.nodes * given.cpus))], timeout=_WARM_S)
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    try:
        sys.stdin.read()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
