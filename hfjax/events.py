# SPDX-License-Identifier: Apache-2.0
"""Numbers as TensorBoard's event files hold them: records of bytes, for others to write."""

import socket
import struct
import time
from collections.abc import Mapping
from typing import Any


class Events:
    """Makes the records of one event file; nothing is written here, and no thread is started."""

    def __init__(self) -> None:
        from tensorboardX.proto import event_pb2  # slow to import
        from tensorboardX.record_writer import masked_crc32c
        from tensorboardX.summary import scalar

        messages: Any = event_pb2
        self._event, self._log = messages.Event, messages.SessionLog
        self._sum, self._scalar = masked_crc32c, scalar
        self.name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"

    def start(self, step: int) -> bytes:
        """The file's begin; what other files have of this step and later ones is void."""
        log = self._log(status=self._log.START)
        version = self._record(step, file_version="brain.Event:2")
        return version + self._record(step, session_log=log)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> bytes:
        """The records of a step's numbers."""
        found = (self._scalar(name, value) for name, value in metrics.items())
        return b"".join(self._record(step, summary=each) for each in found)

    def _record(self, step: int, **what: object) -> bytes:
        data = self._event(wall_time=time.time(), step=step, **what).SerializeToString()
        size = struct.pack("<Q", len(data))
        sums = (struct.pack("<I", self._sum(part)) for part in (size, data))
        return b"".join(part for pair in zip((size, data), sums, strict=True) for part in pair)
