"""A bucket on a real S3 server on loopback, for as long as a test needs it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from moto.server import ThreadedMotoServer


@contextmanager
def s3_bucket(name: str) -> Iterator[dict[str, str]]:
    """An empty bucket of that name. Gives the storage options that reach it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")).close()
        yield {"access_key_id": "x", "secret_access_key": "y", "region": "us-east-1", "endpoint": endpoint}
    finally:
        server.stop()
