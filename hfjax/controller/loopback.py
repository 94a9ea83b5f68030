# SPDX-License-Identifier: Apache-2.0
"""Ray sessions of a run's own: reached from this host alone, and only with their token.

On Linux Ray listens on every interface, as clusters need; the variable that keeps it on loopback
is named after the systems where it always does.
"""

import os
import sys

LISTEN_HERE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
AUTH_MODE = "RAY_AUTH_MODE"


def stay_here() -> None:
    """To be called before Ray is imported; nothing where a session is open or a cluster named.

    A Ray that was imported earlier has fixed its mode of authentication: the token, by default.
    """
    ray = sys.modules.get("ray")
    if os.environ.get("RAY_ADDRESS") or (ray and ray.is_initialized()):
        return
    os.environ[LISTEN_HERE] = "0"
    if ray is None:
        os.environ[AUTH_MODE] = "token"
    elif constants := sys.modules.get("ray._private.ray_constants"):  # it has read the variable
        vars(constants)["ENABLE_RAY_CLUSTER"] = False


def bind_here(coordinator: str) -> None:
    """JAX's coordinator too listens on all interfaces; on one where processes meet on loopback."""
    if coordinator.startswith("127."):
        os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = coordinator
