# SPDX-License-Identifier: Apache-2.0
"""Proves an option by compiling its programs for simulated devices: memory, and bytes that move.

Programs are compiled ahead of time in a process of its own, without an array and without a GPU.
float16 stands for bfloat16, which the CPU compiler would widen; the types that collectives carry
are asserted. That compiler has no fused attention: its temporaries are an upper bound.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hfjax.engine import meter
from hfjax.engine.sampling import Sampling
from hfjax.mapping import memory, temporaries, traffic
from hfjax.mapping.programs import Programs
from hfjax.mapping.work import Model, Option, Workload
from hfjax.models.llama import Head, ModelConfig
from hfjax.models.rope import RopeScaling
from meshes.layouts import TWO_COPIES
from meshes.mesh import MeshShape
from meshes.placement import RolePlacement

DEADLINE_S = 600.0  # of the process that compiles
ITEMSIZE = 2  # of HALF
CARRIED = {"f16", "f32", "s32", "pred"}  # types of collectives: what stands in bfloat16, sums, ids


@dataclass(frozen=True, kw_only=True)
class Job:
    """A role on its devices, and the sizes of what it is given."""

    config: ModelConfig  # with the vocabulary padded as the layout needs it
    head: Head
    placement: RolePlacement
    remat: str = "none"
    micros: int = 0  # micro-batches of an update; 0: it is never trained
    rows: int = 0  # of a micro-batch, over all replicas
    infer_rows: int = 0  # of a scoring pass, over all replicas; 0: it never scores
    prompts: int = 0  # in the KV cache at once, over all replicas; 0: it never generates
    n: int = 1  # responses a prompt
    prompt_tokens: int = 1024
    response_tokens: int = 1024

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def ticks(self) -> int:
        """Turns of the loop over new tokens: one a token, in stages one a micro-batch of them."""
        return (self.response_tokens - 1) * traffic.decode_ticks(
            self.placement.mesh_shape,
            self.prompts // self.placement.mesh_shape.over(self.placement.generate_batch),
            self.placement.relay,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A program: bytes a device as predicted, and as compiled."""

    program: str
    beside: float  # held meanwhile and not read by the program
    arguments: float
    compiled_arguments: int
    outputs: int  # compiled; those that lie in arguments left out
    received: float  # by collectives
    compiled_received: float
    temporaries: float
    compiled_temporaries: int
    cpu_only: float  # of the predicted ones those that only the CPU compiler makes
    seconds: float  # to compile

    @property
    def total(self) -> float:
        """All that a device holds while it runs, as compiled, without what is the CPU's own."""
        temporaries = max(0.0, self.compiled_temporaries - self.cpu_only)
        return self.beside + self.compiled_arguments + self.outputs + temporaries


def jobs(role: str, model: Model, option: Option, work: Workload) -> list[Job]:
    """What `role` runs under an option of the search; scoring apart where its layout is its own."""
    if option.train is None or option.infer is None:
        return [_job(role, model, option, work)]
    trains = dataclasses.replace(_job(role, model, option, work), infer_rows=0)
    scores = dataclasses.replace(option, train=None, generate=None)
    frozen = dataclasses.replace(model, trained=False, generates=False)
    return [trains, _job(role, frozen, scores, work)]


def _job(role: str, model: Model, option: Option, work: Workload) -> Job:
    base = option.train if model.trained else option.infer or option.train
    assert base is not None
    placement = RolePlacement(
        role,
        "pool",
        train=base if model.trained else None,
        infer=None if model.trained else base,
        generate=option.generate,
        zero=option.zero,
        sequence_parallel=option.sequence_parallel,
        relay=option.relay,
    )
    shape = placement.mesh_shape
    batch = work.rows // work.updates
    rows = option.micro_sequences or math.ceil(batch / placement.replicas) * placement.replicas
    per = memory.pass_rows(work.rows // placement.replicas, work.row_tokens)
    generates = model.generates and option.relay != TWO_COPIES
    replicas = shape.over(placement.generate_batch)
    wave = math.ceil(math.ceil(work.prompts / replicas) / option.waves)
    return Job(
        config=dataclasses.replace(model.config, vocab_multiple=shape.tensor * shape.tensor_micro),
        head=model.head,
        placement=placement,
        remat=option.remat,
        micros=math.ceil(batch / rows) if model.trained else 0,
        rows=rows if model.trained else 0,
        infer_rows=per * placement.replicas,
        prompts=wave * replicas if generates else 0,
        n=work.n,
        prompt_tokens=work.prompt_tokens,
        response_tokens=work.response_tokens,
    )


@dataclass(frozen=True)
class Prediction:
    """Bytes a device of one program, by arithmetic."""

    beside: float
    arguments: float
    moves: traffic.Moves
    temporaries: float
    cpu_only: float = 0.0


def predicted(job: Job) -> dict[str, Prediction]:
    """What `compiled` will find, program by program."""
    found: dict[str, Prediction] = {}
    if job.micros:
        found |= _training(job)
    if job.infer_rows:
        found |= _scoring(job)
    if job.prompts:
        found |= _generation(job)
    return found


def compiled(job: Job) -> Iterator[Row]:
    """A row a program, compiled for simulated devices of this process."""
    programs, expected = Programs(job.config, job.head, job.placement), predicted(job)
    for name, lowered in _lowered(job, programs):
        start_s = time.perf_counter()
        made = [each.compile() for each in lowered]
        seconds = time.perf_counter() - start_s
        yield _row(name, expected[name], [_counted(job, programs, each) for each in made], seconds)


def verify(
    jobs: Sequence[Job], memory_bytes: float, *, deadline_s: float = DEADLINE_S
) -> list[Row]:
    """The rows of all `jobs`, each compiled in a process of its own.

    Raises ValueError, with the numbers, where a program does not fit `memory_bytes` of a device.
    """
    rows = [row for job in jobs for row in compile_apart(job, deadline_s)]
    require_room(rows, memory_bytes)
    return rows


def require_room(rows: Sequence[Row], memory_bytes: float) -> None:
    """Refuses programs that need more of a device than it has, by what was compiled."""
    refusals = [
        f"{row.program} needs {row.total / 1e9:.2f} GB a device: arguments "
        f"{row.compiled_arguments / 1e9:.2f}, outputs {row.outputs / 1e9:.2f}, temporaries "
        f"{row.compiled_temporaries / 1e9:.2f}, held beside it {row.beside / 1e9:.2f}"
        for row in rows
        if row.total > memory_bytes
    ]
    if refusals:
        raise ValueError(f"a device has {memory_bytes / 1e9:.2f} GB; " + "; ".join(refusals))


def compile_apart(job: Job, deadline_s: float = DEADLINE_S) -> list[Row]:
    """`compiled` in a process of its own, with as many simulated devices as the job's."""
    devices = job.placement.mesh_shape.devices
    flags = f"--xla_force_host_platform_device_count={devices}"
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "hfjax.mapping.verify"],
            input=json.dumps(dataclasses.asdict(job)),
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise TimeoutError(
            f"compiling the programs of {job.placement.role} took more than {deadline_s} s"
        ) from late
    if answer.returncode:
        raise RuntimeError(f"compiling {job.placement.role}: {answer.stderr[-4000:]}")
    return [Row(**each) for each in json.loads(answer.stdout.splitlines()[-1])]


def table(rows: Sequence[Row]) -> str:
    """Predicted and compiled, GB a device."""
    pairs = ("arguments", "received", "temporaries")
    lines = [f"{'program':12}{'beside':>9}" + "".join(f"{name:>20}" for name in pairs)]
    lines[0] += f"{'outputs':>9}{'total':>9}{'seconds':>9}"
    for row in rows:
        cells = "".join(
            f"{getattr(row, name) / 1e9:10.3f}{getattr(row, 'compiled_' + name) / 1e9:10.3f}"
            for name in pairs
        )
        rest = f"{row.outputs / 1e9:9.3f}{row.total / 1e9:9.2f}{row.seconds:9.1f}"
        lines.append(f"{row.program:12}{row.beside / 1e9:9.2f}{cells}{rest}")
    return "\n".join(lines)


def _lowered(job: Job, programs: Programs) -> Iterator[tuple[str, list[Any]]]:
    """Programs by name; the relay's buckets together."""
    half = job.prompt_tokens
    if job.micros:
        found = programs.training(job.micros, job.rows, job.tokens, remat=job.remat)
        yield from ((name, [each]) for name, each in found.items())
    if job.infer_rows:
        scoring = programs.scoring(job.infer_rows, job.tokens, trained=job.micros > 0)
        yield "scoring", list(scoring.values())
    if job.prompts:
        if buckets := list(programs.relay().values()):
            yield "relay", buckets
        sampling = Sampling(max_new_tokens=job.response_tokens, n=job.n, ignore_eos=True)
        found = programs.generation(job.prompts, half, sampling)
        yield from ((name, [each]) for name, each in found.items())


def _counted(job: Job, programs: Programs, program: Any) -> tuple[meter.Memory, float]:
    """Memory of a program, and bytes that a device receives in it."""
    moved = meter.meter(program, mesh=programs.mesh, trips=job.ticks)
    if strange := set(moved.element_types()) - CARRIED:
        raise AssertionError(f"collectives carry {strange}; these were expected: {CARRIED}")
    return meter.memory(program), moved.bytes_received


def _row(
    name: str, expected: Prediction, made: list[tuple[meter.Memory, float]], seconds: float
) -> Row:
    used = [each for each, _ in made]
    return Row(
        program=name,
        beside=expected.beside,
        arguments=expected.arguments,
        compiled_arguments=sum(each.argument_bytes for each in used),
        outputs=sum(each.output_bytes - each.alias_bytes for each in used),
        received=traffic.received_bytes(expected.moves),
        compiled_received=sum(received for _, received in made),
        temporaries=expected.temporaries,
        compiled_temporaries=max(each.temp_bytes for each in used),
        cpu_only=expected.cpu_only,
        seconds=seconds,
    )


def _training(job: Job) -> dict[str, Prediction]:
    place, shape, cfg = job.placement, job.placement.mesh_shape, job.config
    layout: Any = {"zero": place.zero, "relay": place.relay}
    held = memory.training_bytes(cfg, job.head, shape, **layout, itemsize=ITEMSIZE)
    rows = job.rows // place.replicas
    run: Any = {"rows": rows, "tokens": job.tokens, "micros": job.micros, "remat": job.remat}
    run |= {"sequence_parallel": place.sequence_parallel, "itemsize": ITEMSIZE, **layout}
    moves = traffic.update_traffic(cfg, job.head, shape, **run)
    active, elsewhere = (
        temporaries.activation_bytes(cfg, job.head, shape, **run, cpu=cpu).total
        for cpu in (True, False)
    )
    columns = job.micros * rows * (job.tokens * 5 + 4 * (job.head == "score"))
    read = held.weights or held.master
    beside = held.optimizer - (0 if held.weights else held.master)
    found = {
        "accumulate": Prediction(
            beside,
            read + held.gradients + columns,
            moves["accumulate"],
            active,
            active - elsewhere,
        ),
        "reduce": Prediction(
            held.optimizer + held.weights,
            held.gradients,
            moves["reduce"],
            temporaries.reduce_bytes(cfg, job.head, shape, **layout),
        ),
        "apply": Prediction(
            0.0,
            held.optimizer + held.reduced,
            moves["apply"],
            temporaries.apply_bytes(cfg, job.head, shape, **layout),
        ),
    }
    if held.weights:
        turned = temporaries.cast_bytes(cfg, job.head, shape, **layout)
        cast = Prediction(held.optimizer - held.master, held.master, moves["weights"], turned)
        found = {"weights": cast, **found}
    return found


def _scoring(job: Job) -> dict[str, Prediction]:
    place, shape, cfg = job.placement, job.placement.mesh_shape, job.config
    layout: Any = {"zero": place.zero, "relay": place.relay, "itemsize": ITEMSIZE}
    run: Any = {"rows": job.infer_rows // place.replicas, "tokens": job.tokens, **layout}
    run["sequence_parallel"] = place.sequence_parallel
    read, beside = memory.weight_bytes(cfg, job.head, shape, **layout), 0
    if job.micros:
        held = memory.training_bytes(cfg, job.head, shape, **layout)
        read = held.weights or held.master
        beside = held.optimizer - (0 if held.weights else held.master)
    ids = run["rows"] * (job.tokens * 4 + 4 * (job.head == "score"))
    moves = traffic.forward_traffic(cfg, job.head, shape, **run)
    run |= {"backward": False, "trained": job.micros > 0}
    active, elsewhere = (
        temporaries.activation_bytes(cfg, job.head, shape, **run, cpu=cpu).total
        for cpu in (True, False)
    )
    return {"scoring": Prediction(beside, read + ids, moves, active, active - elsewhere)}


def _generation(job: Job) -> dict[str, Prediction]:
    place, shape, cfg = job.placement, job.placement.mesh_shape, job.config
    layout: Any = {"relay": place.relay, "itemsize": ITEMSIZE}
    rows = job.prompts // shape.over(place.generate_batch)
    held = memory.training_bytes(cfg, job.head, shape, zero=place.zero, **layout)
    weights = memory.generation_bytes(cfg, shape, **layout)
    run: Any = {"rows": rows, **layout}
    moves = traffic.prefill_traffic(cfg, shape, tokens=job.prompt_tokens, **run)
    step = traffic.decode_traffic(cfg, shape, n=job.n, **run)
    prompt = memory.kv_bytes(cfg, shape, slots=job.prompt_tokens, **run)
    own = memory.kv_bytes(cfg, shape, slots=job.response_tokens * job.n, **run)
    slots = job.prompt_tokens + job.response_tokens * job.n
    first, first_elsewhere, later, later_elsewhere = (
        find(cpu=cpu)
        for find in (
            partial(temporaries.prefill_bytes, cfg, shape, tokens=job.prompt_tokens, **run),
            partial(temporaries.decode_bytes, cfg, shape, slots=slots, **run),
        )
        for cpu in (True, False)
    )
    steps = job.response_tokens - 1
    segment = tuple(dataclasses.replace(each, times=each.times * steps) for each in step)
    found = {
        "prefill": Prediction(held.optimizer, weights, moves, first, first - first_elsewhere),
        "segment": Prediction(
            held.optimizer, weights + prompt + own, segment, later, later - later_elsewhere
        ),
    }
    return {"relay": _relay(job, held), **found}


def _relay(job: Job, held: memory.Held) -> Prediction:
    place, shape, cfg = job.placement, job.placement.mesh_shape, job.config
    layout: Any = {"zero": place.zero, "relay": place.relay, "itemsize": ITEMSIZE}
    moves = traffic.relay_traffic(cfg, shape, **layout)
    beside = held.optimizer - (0 if held.weights else held.master)
    read = memory.relay_argument_bytes(cfg, shape, **layout)
    return Prediction(beside, read, moves, temporaries.relay_temporary_bytes(cfg, shape, **layout))


def _read(text: str) -> Job:
    """A job from JSON."""
    found = json.loads(text)
    config, place = found["config"], found["placement"]
    if config["rope_scaling"]:
        config["rope_scaling"] = RopeScaling(**config["rope_scaling"])
    for name in ("train", "infer", "generate"):
        place[name] = MeshShape(**place[name]) if place[name] else None
    return Job(**found | {"config": ModelConfig(**config), "placement": RolePlacement(**place)})


if __name__ == "__main__":
    print(json.dumps([dataclasses.asdict(row) for row in compiled(_read(sys.stdin.read()))]))
