# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a run, done to real runs: what the user sees, and what it costs.

    python -m benchmarks.faults [--only NAME ...] [--placements one two processes] [--out DIR]
    python -m benchmarks.faults kills [--times 100] [--seed 0] [--placements ...] [--out DIR]

Each fault is done to `hfjax train` of the embedded model in a step, on one pool, on two, and on
two processes in a pool. Then the run is resumed and compared, bit for bit, with one that nobody
disturbed. Exit status 1 when a row is not as it is documented here. Faults of disks and nodes need
root, all need Linux.
"""

import argparse
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import kills
from benchmarks.victims import LEFT_S, LONGEST_S, SAVE_EVERY, Victim, differences, mount, own_disk

PLACEMENTS = ("one", "two", "processes")
STEP = 5  # the fault's: one after the second checkpoint
DEADLINE_S = 20.0  # of a call, where the fault is that it does not end
DETECT_S = 15.0  # from a fault that shows itself to the end of the run
PAUSE_S = 40.0
DISK_MB = 64
Act = Callable[[Victim], None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, and what must follow.

    `told` is what `benchmarks.faulty_ppo` does, `act` what is done from outside, `repair` what a
    user does before he resumes.
    """

    told: tuple[str, str, int] | None = None  # do, at, rank (of a reward: the row), in STEP
    act: Act | None = None
    repair: Act = lambda victim: None
    status: int | None = 1
    says: str = ""  # a regular expression, seen exactly once
    says_resumed: str = ""  # the same of the run that goes on from there
    within_s: float = DETECT_S  # from the fault to the end of the run
    resumes: bool = True  # to the bits of an undisturbed run; False: see `goes_on`
    goes_on: bool = False  # the run ends by itself as if nothing had been (status 0)
    equal: bool = True  # in all but what measures the machine
    settings: Mapping[str, Any] = field(default_factory=dict)
    placements: tuple[str, ...] = PLACEMENTS
    disk: bool = False  # the run's directory is a file system of its own
    nodes: int = 0  # of a Ray cluster that is there before; 0: the run's own


def last_rank(victim: Victim) -> int:
    """Of the actor's pool."""
    return 1 if victim.placed == "processes" else 0


def begins(victim: Victim) -> None:
    """Writes down when the fault begins."""
    victim.mark.write_text(str(time.time()))


def go_on(victim: Victim) -> None:
    """Ends a told wait."""
    victim.mark.with_suffix(".go").touch()


def hit(victim: Victim, pid: int, number: int = signal.SIGKILL) -> None:
    begins(victim)
    os.kill(pid, number)


def kill_driver(victim: Victim) -> None:
    hit(victim, victim.process.pid)


def kill_driver_after_save(victim: Victim) -> None:
    """When the second checkpoint is there: it is written while the step goes on."""
    go_on(victim)
    victim.until(lambda: victim.saved() >= 2 * SAVE_EVERY, "second checkpoint")
    kill_driver(victim)


def stop_and_kill_driver(victim: Victim) -> None:
    os.kill(victim.process.pid, signal.SIGSTOP)
    time.sleep(3)
    kill_driver(victim)


def interrupt(victim: Victim) -> None:
    """Ctrl-C, which a terminal sends to all in the foreground; the step goes on."""
    begins(victim)
    os.killpg(victim.process.pid, signal.SIGINT)
    go_on(victim)


def preempt(victim: Victim) -> None:
    """SIGTERM as job managers send it, to every process, and once more by a wrapper."""
    begins(victim)
    for pid in victim.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    os.kill(victim.process.pid, signal.SIGTERM)
    go_on(victim)


def in_a_save(whom: Callable[[Victim], int]) -> Act:
    """Kills a process as soon as the second checkpoint is being written."""

    def act(victim: Victim) -> None:
        victim.until(lambda: victim.saving(2 * SAVE_EVERY), "save")
        hit(victim, whom(victim))

    return act


def pause_worker(victim: Victim) -> None:
    """Longer than JAX's collectives wait by themselves."""
    begins(victim)
    pid = victim.workers()[-1]
    os.kill(pid, signal.SIGSTOP)
    go_on(victim)
    time.sleep(PAUSE_S)
    os.kill(pid, signal.SIGCONT)


def kill_raylet(victim: Victim) -> None:
    hit(victim, victim.named("raylet/raylet"))
    go_on(victim)


def kill_gcs(victim: Victim) -> None:
    hit(victim, victim.named("gcs/gcs_server"))
    go_on(victim)


def fill_disk(victim: Victim) -> None:
    begins(victim)
    with (victim.out / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"0" * 4096):
            pass
    os.truncate(victim.out / "filler", (victim.out / "filler").stat().st_size - (1 << 20))
    go_on(victim)


def write_protect(victim: Victim) -> None:
    begins(victim)
    folder = str(victim.out / "checkpoints")
    mount("--bind", folder, folder)
    mount("-o", "remount,ro,bind", folder)
    go_on(victim)


def allow_writing(victim: Victim) -> None:
    mount("-o", "remount,rw,bind", str(victim.out / "checkpoints"))


def cut_metrics(victim: Victim) -> None:
    """As a machine that went down leaves it: half a line."""
    path = victim.out / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-200])


def flip_byte(victim: Victim) -> None:
    """In the largest file of the newest checkpoint."""
    folder = victim.out / "checkpoints" / f"step_{victim.saved():08d}"
    file = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
    held = bytearray(file.read_bytes())
    held[len(held) // 2] ^= 1
    file.write_bytes(bytes(held))


def lose_node(victim: Victim) -> None:
    """The machine of the second process, as far as Ray can tell."""
    begins(victim)
    victim.lose_node()
    go_on(victim)


LAST = -1  # the last rank of the actor's pool
ACTOR = rf"role 'actor', update_actor at step {STEP} \(rank \d of pool '\w+' on host \S+\)"


def ended(how: str) -> str:
    """The actor's update, or that of the critic before: a process keeps what it has just said."""
    critic = rf"role 'critic', update_critic at step {STEP} .*: {how}"
    return rf"(?:{ACTOR}: {how}|{critic} \(or in role 'actor', update_actor, which followed\))"


DIED = ended("the process died")
REWARD = r"role 'reward', compute_reward at step 5 .*reward .*:reward, row 3"
RAYLET = r"Ray's raylet on this host .* is gone"
# Ray may end the driver before it has noticed, and says why more than once.
RAY_ALONE = rf"\A(?![\s\S]*{RAYLET})[\s\S]*Raylet is terminated[\s\S]*"
WAITS = ("wait", "reward", 0)  # the step is held up while something is done from outside
SKIP = {"reward": {"on_error": "skip"}}
FAULTS = {
    "worker killed": Fault(told=("kill", "update", LAST), says=DIED),
    "worker killed, restarted": Fault(
        told=("kill", "update", LAST),
        status=0,
        goes_on=True,
        says=rf"restart 1 of 1 from step \d: ({DIED})",
        within_s=LONGEST_S,
        settings={"max_restarts": 1},
    ),
    "worker stopped": Fault(
        told=("stop", "update", LAST),
        says=rf"{ended('not finished after deadline_s=20')}[\s\S]*does not respond",
        within_s=DEADLINE_S + DETECT_S,
        settings={"deadline_s": DEADLINE_S},
    ),
    "worker hangs": Fault(
        told=("hang", "update", LAST),
        says=rf"{ACTOR}: not finished after deadline_s=20[\s\S]*time\.sleep\(3600\)",
        within_s=DEADLINE_S + DETECT_S,
        settings={"deadline_s": DEADLINE_S},
    ),
    "worker raises": Fault(
        told=("raise", "update", LAST), says=rf"{ACTOR}: ZeroDivisionError: told to fail"
    ),
    "worker out of memory": Fault(
        told=("memory", "update", LAST), says=f"{ACTOR}: .*MemoryError|{DIED}"
    ),
    "worker exits": Fault(told=("exit", "update", LAST), says=DIED),
    "worker leaves": Fault(told=("leave", "update", LAST), says=DIED),
    "critic killed": Fault(
        told=("kill", "critic", 0),
        says=rf"role 'critic', update_critic at step {STEP} .*: the process died",
    ),
    "worker paused 40 s": Fault(
        told=WAITS, act=pause_worker, status=0, goes_on=True, within_s=PAUSE_S + 2 * DETECT_S
    ),
    "driver killed": Fault(told=WAITS, act=kill_driver, status=-signal.SIGKILL),
    "driver killed, on a cluster": Fault(
        told=WAITS,
        act=kill_driver,
        status=-signal.SIGKILL,
        nodes=2,
        placements=("processes",),
        repair=go_on,  # the cluster's workers have the fault in their environment still
    ),
    "driver stopped, killed": Fault(told=WAITS, act=stop_and_kill_driver, status=-signal.SIGKILL),
    "driver killed in a save": Fault(
        act=in_a_save(lambda victim: victim.process.pid), status=-signal.SIGKILL
    ),
    "worker killed in a save": Fault(
        act=in_a_save(lambda victim: victim.workers()[-1]),
        says=r"role '\w+', \w+ at step \d \(rank \d of pool '\w+' on host \S+\): the process died",
    ),
    "Ctrl-C": Fault(told=WAITS, act=interrupt, status=130, says="stopped after step"),
    "SIGTERM": Fault(told=WAITS, act=preempt, status=143, says="stopped after step"),
    "disk full": Fault(
        told=WAITS,
        act=fill_disk,
        disk=True,
        says="No space left on device",
        repair=lambda victim: (victim.out / "filler").unlink(),
    ),
    "directory unwritable": Fault(
        told=WAITS,
        act=write_protect,
        disk=True,
        says="Read-only file system",
        repair=allow_writing,
    ),
    "metrics cut": Fault(told=WAITS, act=kill_driver, status=-signal.SIGKILL, repair=cut_metrics),
    "checkpoint damaged": Fault(
        told=WAITS,
        act=kill_driver_after_save,
        status=-signal.SIGKILL,
        repair=flip_byte,
        says_resumed=r"checkpoint of step 4 in \S+ is damaged .* ignored; that of step 2 is used",
    ),
    "reward raises": Fault(
        told=("raise", "reward", 3), says=rf"{REWARD} raised:[\s\S]*ZeroDivisionError: told to fail"
    ),
    "reward sleeps": Fault(
        told=("hang", "reward", 3), says=f"{REWARD} took longer than 5 s", within_s=10 + DETECT_S
    ),
    "reward exits": Fault(
        told=("exit", "reward", 3), says=rf"{REWARD} ended its process \(exit status 3\)"
    ),
    "reward exits, skip": Fault(
        told=("exit", "reward", 3),
        status=0,
        goes_on=True,
        equal=False,
        settings=SKIP,
        says=r"1 of 16 rows failed; row 3 ended its process \(exit status 3\)",
    ),
    "score is NaN": Fault(
        told=("nan", "scores", 0), status=0, goes_on=True, equal=False, within_s=LONGEST_S
    ),
    "scores are NaN": Fault(
        told=("always", "scores", 0),
        resumes=False,
        within_s=LONGEST_S,
        settings={"steps": 20},
        says=r"10 steps in a row, up to \d+, had updates that were not finite",
    ),
    "Ray node lost": Fault(
        told=WAITS,
        act=lose_node,
        nodes=2,
        placements=("two", "processes"),
        says="the process died",
        within_s=45,
        repair=Victim.add_node,
    ),
    "raylet killed": Fault(told=WAITS, act=kill_raylet, says=rf"{RAYLET}|{RAY_ALONE}"),
    "GCS killed": Fault(told=WAITS, act=kill_gcs, says="Ray's gcs_server on this host .* is gone"),
}


@dataclass(frozen=True)
class Row:
    """What one fault did on one placement."""

    fault: str
    placement: str
    status: int | None
    said: str
    seconds: float  # from the fault to the end of the run
    lost: int  # steps that were begun and are done again
    left: int  # processes, LEFT_S after the end
    gone_s: float
    saved: int  # the step of the checkpoint that loads
    wrong: tuple[str, ...]  # what is not as documented

    def line(self) -> str:
        return (
            f"{self.fault:28}{self.placement:11}{self.status!s:>7}{self.seconds:9.1f}"
            f"{self.lost:6}{self.left:6}{self.gone_s:7.1f}{self.saved:6}  "
            f"{'as documented' if not self.wrong else 'WRONG: ' + '; '.join(self.wrong)}\n"
            f"    {self.said[:180]}"
        )


HEAD = (
    f"{'fault':28}{'placement':11}{'status':>7}{'seconds':>9}{'lost':>6}{'left':>6}{'gone s':>7}"
    f"{'saved':>6}  and resumed: records, samples, rows, weights"
)


def seen_once(pattern: str, console: str) -> list[str]:
    """What is wrong where it is not; nothing is asked where the pattern is empty."""
    seen = len(re.findall(pattern, console)) if pattern else 1
    return [f"{pattern!r} is seen {seen} times"] if seen != 1 else []


def try_fault(name: str, placed: str, folder: Path, whole: Victim) -> Row:
    """Does a fault to a run, resumes it and compares it with the undisturbed one."""
    fault = FAULTS[name]
    over = {"deadline_s": 300.0} | dict(fault.settings)
    victim = Victim(folder, placed, over)
    told = None
    if fault.told:
        do, at, rank = fault.told
        told = {"do": do, "at": at, "step": STEP, "rank": last_rank(victim) if rank < 0 else rank}
    with ExitStack() as scope:
        scope.callback(victim.left, 0.0)
        if fault.disk:
            scope.enter_context(own_disk(victim.out, DISK_MB))
        if fault.nodes:
            scope.enter_context(victim.on_cluster(fault.nodes, told))
        victim.start(told)
        if told:
            victim.until(victim.mark.exists, f"step {STEP}")
        if fault.act:
            fault.act(victim)
        status = victim.end(fault.within_s + LEFT_S)
        began_s = float(victim.mark.read_text())
        seconds, said, console = time.time() - began_s, victim.said(), victim.console()
        wrong = [] if status == fault.status else [f"status {fault.status} is documented"]
        if seconds > fault.within_s:
            wrong.append(f"longer than {fault.within_s:g} s")
        wrong += seen_once(fault.says, console)
        left, gone_s = victim.left()
        wrong += [f"left: {left}"] if left else []
        saved, last = victim.saved(), victim.last_step()
        lost = max(last, STEP if fault.told and status else 0) - saved
        if not fault.goes_on:
            victim.arrays()  # the last checkpoint loads
        fault.repair(victim)
        if fault.resumes and not fault.goes_on and victim.finish(resume=True) != 0:
            wrong.append(f"is not resumed: {victim.said()}")
        elif fault.resumes and fault.equal:
            wrong += [f"differs: {what}" for what in differences(victim, whole)]
            wrong += seen_once(fault.says_resumed, victim.console())
        wrong += [f"{name} is not finite" for name in victim.not_finite()]
        more, _ = victim.left()
        wrong += [f"left after resuming: {more}"] if more else []
    return Row(name, placed, status, said, seconds, lost, len(left), gone_s, saved, tuple(wrong))


def table(rows: Sequence[Row]) -> str:
    """Two lines a row, under a header that names device and versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "flax", "ray"))
    faults, wrong = len({row.fault for row in rows}), sum(bool(row.wrong) for row in rows)
    return "\n".join(
        [
            f"Faults in step {STEP} of the embedded PPO run, runtime ray, simulated devices of "
            f"{platform.machine()} CPU with {os.cpu_count()} cores; {versions}",
            HEAD,
            *(row.line() for row in rows),
            f"{len(rows)} rows of {faults} faults, {wrong} not as documented",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, or kills runs at random; 1 when something is not as documented."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["kills"]:
        return kills.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--only", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--placements", nargs="*", default=PLACEMENTS, choices=PLACEMENTS)
    parser.add_argument("--out", help="a new directory to keep the runs in")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(options.out or scratch)
        for placed in options.placements:
            whole = Victim(out / f"whole-{placed}", placed)
            if status := whole.finish():
                raise RuntimeError(f"the undisturbed run ended with {status}:\n{whole.console()}")
            for name in options.only:
                if placed in FAULTS[name].placements:
                    folder = out / f"{name.replace(' ', '-').replace(',', '')}-{placed}"
                    rows.append(try_fault(name, placed, folder, whole))
                    print(rows[-1].line(), flush=True)
    print(table(rows))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
