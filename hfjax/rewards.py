# SPDX-License-Identifier: Apache-2.0
"""Scores from Python functions in worker processes, with a deadline for each response."""

import codecs
import contextlib
import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Self

import numpy as np

from hfjax.config import RewardConfig
from hfjax.controller.protocol import ONE_TO_ALL, Answer, Shard, method
from hfjax.controller.worker import RoleContext
from hfjax.files import printable
from hfjax.reward_process import Scored, Texts, decoded
from hfjax.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

START_S = 120.0  # longest import of the function's module
CHUNK_ROWS = 8  # smallest share of a batch for fast functions: less does not pay for a message
MOST_ANSWER_BYTES = 1 << 26
SHOWN_BYTES = 1 << 16  # of what a process prints
LAST_BYTES = 1 << 11  # of it, told when it ends by itself
SLOW_S = 0.01  # functions slower than this a row are shared out down to two rows
# Not multiprocessing, which would import our main module.
SERVE = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from hfjax.reward_process import serve
serve(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), int(sys.argv[5]), sys.argv[6])"""
CRASHES = (-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV)  # also where memory is refused


class RewardError(RuntimeError):
    """The reward function failed; the message names it, the row and what happened."""


class Job(NamedTuple):
    """Rows start to stop - 1 of the batch, for one call of the function."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class _Worker:
    """One process, the job it has, and when that is due."""

    def __init__(self, spec: str, memory_gb: float, section: str) -> None:
        self._spec, self._memory_gb = spec, memory_gb
        self._bound = f"{section}.memory_gb={memory_gb:g}"
        self._rows = 0  # of the job sent last
        self._waiting: tuple[float, Texts] | None = None  # a job not sent yet: it is starting
        self.seconds = 0.0  # taken by the last job
        self._start()

    @property
    def due(self) -> float:
        """When the current job, or the start, will have taken too long."""
        return self._began + self._allowed_s

    def begin(self, texts: Texts, allowed_s: float) -> None:
        """Gives the process a job, at once or as soon as it has started."""
        self._waiting = allowed_s, texts
        if self._process is None:
            self._start()
        elif self._ready:
            self._send()

    def advance(self, *, readable: bool) -> Scored | None:
        """The job's answer if there is one: received, or told from the process's death or delay."""
        blame = "row" if self._ready else "function"
        if readable:
            try:
                message = self.connection.recv_bytes(MOST_ANSWER_BYTES)
            except BlockingIOError:  # sent in part only
                return self._overran(blame)
            except (EOFError, OSError):
                status, told = self.stop(patience_s=1.0)
                killed = blame == "row" and status == -signal.SIGKILL
                words = self._last.decode("utf-8", "ignore").strip()
                told = f"ended its process ({told})" + (
                    f"; it printed last:\n{words}" * bool(words)
                )
                return Scored("killed" if killed else blame, [], told)
            self.seconds = time.monotonic() - self._began
            answer = decoded(message, self._rows)
            expected = ("scores", "row", "function") if self._ready else ("ready", "function")
            if answer is None or answer.kind not in expected:
                self.stop()
                return Scored(blame, [], "sent the controller something that is no answer")
            if answer.kind != "ready":
                return answer
            self._ready = True
            if self._waiting is not None:
                self._send()
        elif time.monotonic() >= self.due:
            return self._overran(blame)
        return None

    def wait_until_ready(self) -> None:
        """Returns when the function is loaded; raises ValueError with the reason if it is not."""
        while not self._ready:
            readable = bool(wait([self.connection], max(0.0, self.due - time.monotonic())))
            if answer := self.advance(readable=readable):
                raise ValueError(answer.reason)

    def stop(self, patience_s: float = 0.0) -> tuple[int | None, str]:
        """Kills the process and all it started; the status with which it had ended, and as told."""
        if self._process is None:
            return None, ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        status = self._process.returncode
        told = f"exit status {status}"
        if status == -signal.SIGKILL:
            told += ": killed by the kernel, for want of memory?"
        elif status in CRASHES:
            told += f": for want of memory? It may allocate {self._bound}"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._relay.join(1.0)  # what it printed comes before what is said of it
        self.connection.close()
        return status, told

    def _start(self) -> None:
        """In a session of its own: Ctrl-C does not reach it, and one signal ends its children."""
        self.connection, theirs = Pipe()
        path = json.dumps([entry or str(Path.cwd()) for entry in sys.path])
        own = [str(theirs.fileno()), self._spec, str(self._memory_gb), str(os.getpid())]
        own.append(self._bound)
        self._ready, self._rows = False, 0
        self._allow(START_S)
        with theirs:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [sys.executable, "-c", SERVE, path, *own],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},  # the devices are the trainer's
            )
        assert self._process.stdout is not None
        self._last = bytearray()
        printed = self._process.stdout, self._spec, self._last
        self._relay = threading.Thread(target=_relay, args=printed, daemon=True)
        self._relay.start()

    def _send(self) -> None:
        assert self._waiting is not None
        self._allow(self._waiting[0])
        self._rows = len(self._waiting[1][1])
        try:
            self.connection.send(self._waiting)
        except BlockingIOError:  # it does not read; advance() ends it when it is due
            pass
        except OSError:  # it died while idle, of no row
            self.stop()
            self._start()
            return
        self._waiting = None

    def _allow(self, seconds: float) -> None:
        """From now on the process has so long; sending to it and receiving from it end by then.

        The socket's own limit is half of it, because a message cut short blocks a second time.
        """
        self._began, self._allowed_s = time.monotonic(), seconds
        limit = struct.pack("ll", *divmod(max(1, int(seconds * 1e6 / 2)), 1_000_000))
        with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, way, limit)

    def _overran(self, blame: Literal["row", "function"]) -> Scored:
        self.stop()
        return Scored(blame, [], f"took longer than {self._allowed_s:.3g} s")


def _relay(printed: IO[bytes], spec: str, last: bytearray) -> None:
    """Shows the beginning of what a process prints and reads on: no print of it ever blocks.

    `last` holds its end.
    """
    shown = 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with printed:
        while part := os.read(printed.fileno(), 1 << 16):
            last += part
            del last[:-LAST_BYTES]
            text = decoder.decode(part[: max(0, SHOWN_BYTES - shown)])
            if shown < SHOWN_BYTES <= shown + len(part):
                text += f"\n{spec} printed more than {SHOWN_BYTES} bytes; the rest is not shown\n"
            shown += len(part)
            with contextlib.suppress(OSError):  # nobody reads it any more
                sys.stderr.write(printable(text))


def _answers(busy: Collection[_Worker]) -> dict[_Worker, Scored]:
    """Waits until at least one of the workers has an answer."""
    while True:
        patience_s = max(0.0, min(worker.due for worker in busy) - time.monotonic())
        readable = wait([worker.connection for worker in busy], patience_s)
        found = {w: w.advance(readable=w.connection in readable) for w in busy}
        if answers := {w: answer for w, answer in found.items() if answer is not None}:
            return answers


def _stop_all(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.stop()


class RewardPool:
    """Scores batches with a Python function in `workers` processes.

    A batch is cut into chunks of adjacent rows, so the function must judge each row by itself.
    A chunk that raises, dies or overruns is repeated row by row, each row with a deadline of its
    own; a process that died or overran is replaced. The culprits' rows then fail the call
    (on_error="fail") or get 0 and are marked (on_error="skip"). A wrong number of scores is no
    row's fault and always fails, and so do two rows of a batch whose processes the kernel killed.
    """

    def __init__(
        self,
        function: str,
        *,
        workers: int = 2,
        deadline_s: float = 30.0,
        on_error: Literal["fail", "skip"] = "fail",
        memory_gb: float = RewardConfig.memory_gb,
        section: str = "reward",
    ) -> None:
        """`section` is that of its settings, which messages name."""
        if workers < 1:
            raise ValueError(f"{section}.workers={workers}: must be at least 1")
        if deadline_s <= 0:
            raise ValueError(f"{section}.deadline_s={deadline_s}: must be above 0 seconds")
        if on_error not in ("fail", "skip"):
            raise ValueError(f"{section}.on_error={on_error!r}: use 'fail' or 'skip'")
        self.function, self.deadline_s, self.section = function, deadline_s, section
        self._skip = on_error == "skip"
        self._row_s = 0.0  # seconds that a row has taken, a running average
        self._workers = [_Worker(function, memory_gb, section) for _ in range(workers)]
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)
        try:
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def score(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        ground_truths: Sequence[Any],
        step: int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """float32 scores, and a mask that is True for the rows that failed."""
        texts = (list(prompts), list(responses), list(ground_truths))
        if len({len(column) for column in texts}) != 1:
            sizes = ", ".join(str(len(column)) for column in texts)
            raise ValueError(f"prompts, responses and ground truths differ in number: {sizes}")
        try:
            scores, reasons = self._run((*texts, [(step, row) for row in range(len(prompts))]))
        except BaseException:  # Ctrl-C too: no process may go on with half a batch
            _stop_all(self._workers)
            raise
        failed = np.zeros(len(scores), bool)
        if reasons:
            failed[list(reasons)] = True
            row = min(reasons)
            counts = f"{len(reasons)} of {len(scores)} rows failed"
            where = f"{self.section} {self.function}"
            log.warning("%s: %s; row %d %s", where, counts, row, printable(reasons[row]))
        return scores, failed

    def close(self) -> None:
        """Ends the worker processes and whatever they started."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, texts: Texts) -> tuple[np.ndarray, dict[int, str]]:
        """Scores and, by row, the reasons of those that failed."""
        scores = np.zeros(len(texts[0]), np.float32)
        reasons: dict[int, str] = {}
        killed: int | None = (
            None  # a row alone whose process was killed: a second is no row's fault
        )
        where = f"{self.section} {self.function}"
        jobs, busy = deque(self._chunks(len(scores))), dict[_Worker, Job]()
        while jobs or busy:
            for worker in self._workers:
                if jobs and worker not in busy:
                    job = busy[worker] = jobs.popleft()
                    part = tuple(column[job.start : job.stop] for column in texts)
                    worker.begin(part, self._allowed_s(job.rows))
            for worker, answer in _answers(busy).items():
                job = busy.pop(worker)
                if answer.kind == "scores":
                    scores[job.start : job.stop] = answer.scores
                    self._row_s += 0.5 * (worker.seconds / job.rows - self._row_s)
                elif answer.kind == "function":
                    raise RewardError(f"{where} {printable(answer.reason)}")
                elif job.rows > 1:
                    jobs.extend(Job(row, row + 1) for row in range(job.start, job.stop))
                elif answer.kind == "killed" and killed is not None:
                    rows = f"rows {killed} and {job.start}"
                    raise RewardError(f"{where}, {rows} {printable(answer.reason)}")
                elif self._skip:
                    reasons[job.start] = answer.reason
                    killed = job.start if answer.kind == "killed" else killed
                else:
                    told = printable(answer.reason)
                    raise RewardError(f"{where}, row {job.start} {told}")
        return scores, reasons

    def _chunks(self, rows: int) -> list[Job]:
        """Equal shares; not single rows, whose one score would hide a wrong number of scores."""
        least = 2 if self._row_s > SLOW_S else CHUNK_ROWS
        size = max(math.ceil(rows / len(self._workers)), least)
        return [Job(start, min(start + size, rows)) for start in range(0, rows, size)]

    def _allowed_s(self, rows: int) -> float:
        """One row's deadline, and three times what the others usually take.

        Not the sum of their deadlines: one stuck row would hold a chunk as long as that.
        """
        return min(rows * self.deadline_s, self.deadline_s + 3.0 * rows * self._row_s)


SETTINGS = ("workers", "deadline_s", "on_error", "memory_gb")  # of a pool
READS = ("input_ids", "prompt_length", "length", "response_mask", "prompt", "ground_truth")


class FunctionReward:
    """A Python function of texts, run in worker processes beside the controller."""

    on_driver = True
    section = "reward"  # its settings

    def __init__(self, context: RoleContext, *, model: str, reward: RewardConfig) -> None:
        self.tokenizer = load_tokenizer(model)
        self.pool = self.eval_pool = _pool(reward, self.section, "function")
        if reward.eval_function:
            self.eval_pool = _pool(reward, self.section, "eval_function")

    @method(
        ONE_TO_ALL,
        reads=READS,
        writes=("score", "response", "response_mask"),
    )
    def compute_reward(self, shard: Shard, *, evaluates: bool = False) -> Answer:
        """score (B,) and the response texts; rows that failed are masked out."""
        c = shard.columns
        rows = zip(c["input_ids"], c["prompt_length"], c["length"], strict=True)
        response = [self.tokenizer.decode(ids[start:end]) for ids, start, end in rows]
        pool = self.eval_pool if evaluates else self.pool
        score, failed = pool.score(c["prompt"], response, c["ground_truth"], shard.step)
        columns = {
            "score": score,
            "response": response,
            "response_mask": c["response_mask"] & ~failed[:, None],
        }
        return Answer(columns, shard.rows, {"reward/failed": float(failed.sum())})

    def close(self) -> None:
        """Ends the worker processes."""
        self.pool.close()
        self.eval_pool.close()


class FunctionCost(FunctionReward):
    """A Python function of texts that says what a response costs."""

    section = "cost"

    @method(ONE_TO_ALL, reads=READS, writes=("cost", "response_mask"))
    def compute_cost(self, shard: Shard) -> Answer:
        """cost (B,); rows that failed are masked out."""
        answer = self.compute_reward(shard)
        found = answer.columns
        columns = {"cost": found["score"], "response_mask": found["response_mask"]}
        return Answer(columns, answer.rows, {"cost/failed": answer.metrics["reward/failed"]})


def _pool(reward: RewardConfig, section: str, setting: str) -> RewardPool:
    """Processes of the function that a setting names."""
    how = {name: getattr(reward, name) for name in SETTINGS}
    try:
        return RewardPool(getattr(reward, setting), section=section, **how)
    except ValueError as error:
        raise ValueError(f"{section}.{setting}: {error}") from error
