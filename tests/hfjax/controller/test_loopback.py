# SPDX-License-Identifier: Apache-2.0
"""A run that asks for no cluster listens on loopback alone; its processes heed the driver alone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ray

PROGRAM = """
import json, os, signal, sys, time
before = dict(os.environ)
if sys.argv[1] == "first":
    import ray
from toys import Summer
from hfjax.batch import Batch
from hfjax.controller.handle import start
from hfjax.controller.processes import alive
from meshes.mesh import MeshShape
from meshes.placement import Placement, Pool, RolePlacement
from tests.hfjax.controller.test_loopback import family_of, listening, tokenless

place = Placement(
    {"world": Pool("world", 4, 2), "one": Pool("one", 2)},
    {"summer": RolePlacement("summer", "world", train=MeshShape(data=4)),
     "other": RolePlacement("other", "one", infer=MeshShape(data=2))},
    platform="cpu",
)
BUILDERS = {"summer": Summer, "other": Summer}
with start(place, BUILDERS, deadline_s=60.0, log_to_driver=False) as models:
    models.summer.sums(Batch(x=range(1, 5)))["sum"].tolist()
    told = [listening(os.getpid()), tokenless()]
    family = family_of(os.getpid()) - {os.getpid()}
    for pid in family:
        os.kill(pid, signal.SIGTERM)
    time.sleep(1)
    told.append(models.summer.sums(Batch(x=range(1, 5)))["sum"].tolist())
left = {k: v for k, v in os.environ.items() if "AUTH" in k or "CLUSTER" in k}
told.append(left == {k: v for k, v in before.items() if k in left})
print(json.dumps([*told, [pid for pid in family if alive(pid)]]))
"""


def family_of(root: int) -> set[int]:
    """A process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(root: int) -> list[tuple[str, int]]:
    """Addresses, as the kernel spells them, and ports on which a family of processes listens."""
    sockets = set()
    for pid in family_of(root):
        for end in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(end))
            except OSError:
                continue
    found = []
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and f"socket:[{parts[9]}]" in sockets:
                address, _, port = parts[1].partition(":")
                found.append((address, int(port, 16)))
    return found


def tokenless() -> str:
    """What Ray's head says to a call without its token."""
    import grpc
    import ray
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    address = ray.get_runtime_context().gcs_address
    with grpc.insecure_channel(address) as channel:
        stub: Any = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            stub.GetAllNodeInfo(gcs_service_pb2.GetAllNodeInfoRequest(), timeout=10)
        except grpc.RpcError as error:
            return str(error.code())  # type: ignore[reportAttributeAccessIssue]
    return "answered"


@pytest.mark.parametrize("imported", ["by the run", "first"])
def test_nothing_of_a_run_listens_beyond_this_host(imported: str, tmp_path: Path) -> None:
    """Also where Ray was imported first, and where the environment says otherwise.

    Gloo listens where the host's name leads. SIGTERM to all but the driver ends nobody; in the end
    neither processes nor variables nor a token in a file are left.
    """
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root), str(Path(__file__).parent)])
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    environment |= {"RAY_AUTH_MODE": "disabled"} if imported == "by the run" else {}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, imported],
        **{"capture_output": True, "text": True, "timeout": 240, "env": environment},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    sockets, answer, after, put_back, left = json.loads(ran.stdout.splitlines()[-1])
    assert len(sockets) >= 6  # Ray's head and node, the coordinator, a probe of each process
    gloo = socket.inet_aton(socket.gethostbyname(socket.gethostname()))[::-1].hex().upper()
    assert {address for address, _ in sockets} <= {
        gloo,
        "0100007F",
        "00000000000000000000000001000000",
        "0000000000000000FFFF00000100007F",
    }
    assert answer == "StatusCode.UNAUTHENTICATED"
    assert after == [10.0] * 4
    assert put_back
    assert left == []
    assert not (tmp_path / ".ray" / "auth_token").exists()
