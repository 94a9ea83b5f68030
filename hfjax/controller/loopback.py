# SPDX-License-Identifier: Apache-2.0
"""Ray sessions of a run's own: reached from this host alone, and only with their token.

On Linux Ray listens on every interface, as clusters need; the variable that keeps it on loopback
is named after the systems where it always does.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LISTEN_HERE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
AUTH_MODE = "RAY_AUTH_MODE"
AUTH_TOKEN = "RAY_AUTH_TOKEN"


@contextmanager
def staying_here() -> Iterator[None]:
    """Around a session; to be entered before Ray is imported where that is possible.

    Does nothing where a session is open or a cluster named. The session's token is in no file.
    """
    ray = sys.modules.get("ray")
    if os.environ.get("RAY_ADDRESS") or (ray and ray.is_initialized()):
        yield
        return
    given = {AUTH_TOKEN: secrets.token_hex(32)} | dict(os.environ)
    before = {name: os.environ.get(name) for name in (LISTEN_HERE, AUTH_MODE, AUTH_TOKEN)}
    wanted = {LISTEN_HERE: "0", AUTH_MODE: "token", AUTH_TOKEN: given[AUTH_TOKEN]}
    constants = vars(sys.modules.get("ray._private.ray_constants") or sys)
    spread = constants.get("ENABLE_RAY_CLUSTER")  # of a Ray that has read the variable
    os.environ |= wanted
    if spread is not None:
        constants["ENABLE_RAY_CLUSTER"] = False
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if spread is not None:
            constants["ENABLE_RAY_CLUSTER"] = spread
        _read_again()


def _read_again() -> None:
    """A Ray that is imported holds the mode and the token that it has seen first."""
    raylet: Any = sys.modules.get("ray._raylet")
    if raylet:
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def bind_here(coordinator: str) -> None:
    """JAX's coordinator and NCCL too listen beyond this host; not where processes meet on loopback.

    Gloo listens where the host's name leads, and can be told nothing else.
    """
    if coordinator.startswith("127."):
        os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = coordinator
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
