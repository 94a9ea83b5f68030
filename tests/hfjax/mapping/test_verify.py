# SPDX-License-Identifier: Apache-2.0
"""What is predicted against what is compiled, in many layouts, and refusals."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.mapping import jobs
from hfjax.mapping.memory import pass_rows
from hfjax.mapping.verify import Job, Row, compile_apart, compiled, require_room, table, verify
from hfjax.mapping.verify import jobs as verify_jobs
from hfjax.mapping.work import Model, Option, Workload
from hfjax.models.llama import ModelConfig
from meshes.mesh import MeshShape
from meshes.placement import RolePlacement

CFG = ModelConfig(
    layers=4,
    embed=256,
    heads=8,
    kv_heads=4,
    head_dim=32,
    mlp=512,
    vocab=1024,
    rope_theta=1e4,
)
SMALL = 4096  # bytes: statistics, norms, draws, which no formula counts


def a_job(train: MeshShape, generate: MeshShape | None = None, **over: Any) -> Job:
    of_place = ("zero", "sequence_parallel", "relay")
    options = {name: over.pop(name) for name in of_place if name in over}
    place = RolePlacement("actor", "all", train=train, generate=generate, **options)
    sizes: Any = {
        "head": "lm",
        "micros": 2,
        "rows": place.replicas,
        "infer_rows": 2 * place.replicas,
    }
    if generate:
        sizes["prompts"] = 2 * place.mesh_shape.over(place.generate_batch)
    sizes |= {"prompt_tokens": 16, "response_tokens": 16, "remat": "layer"}
    return Job(config=CFG, placement=place, **(sizes | over))


LAYOUTS = {
    "tensor, generated on halves": a_job(
        MeshShape(data=2, tensor=4), MeshShape(tensor=2), infer_rows=0
    ),
    "zero 1": a_job(MeshShape(data=2, fsdp=2, tensor=2), zero=1, infer_rows=0),
    "a pipeline that only infers": a_job(MeshShape(fsdp=2, pipe=2, tensor=2), micros=0),
}
MORE = {
    "a pipeline of zero 3": a_job(MeshShape(fsdp=2, pipe=2, tensor=2), remat="none"),
    "data": a_job(MeshShape(data=8), MeshShape(), remat="none"),
    "zero 2": a_job(MeshShape(fsdp=4, tensor=2), MeshShape(tensor=2), zero=2, remat="dots"),
    "zero 3": a_job(MeshShape(data=2, fsdp=4), MeshShape()),
    "zero 3 of values": a_job(MeshShape(fsdp=4, tensor=2), head="value", remat="none"),
    "zero 3 of scores": a_job(MeshShape(fsdp=4, tensor=2), head="score"),
    "stages": a_job(MeshShape(data=2, pipe=4), MeshShape(pipe=2), remat="dots", rows=6),
    "stages of generation": a_job(MeshShape(pipe=2, tensor=4), MeshShape(pipe=2, tensor=2), n=2),
    "consecutive groups": a_job(MeshShape(data=2, tensor=4), MeshShape(tensor=2), relay="hybrid-v"),
    "all devices": a_job(MeshShape(fsdp=8), MeshShape(tensor=4), relay="ds-chat"),
    "positions": a_job(MeshShape(data=2, tensor=4), sequence_parallel=True),
    "positions, all kept": a_job(MeshShape(fsdp=2, tensor=4), sequence_parallel=True, remat="none"),
    "positions in stages": a_job(MeshShape(pipe=2, tensor=4), sequence_parallel=True),
}


def require_close(row: Row, temporaries: float | None = None) -> None:
    assert row.arguments == pytest.approx(row.compiled_arguments, rel=0.01, abs=SMALL), row
    assert row.received == pytest.approx(row.compiled_received, rel=0.05, abs=SMALL), row
    if temporaries:
        near = pytest.approx(row.compiled_temporaries, rel=temporaries, abs=SMALL)
        assert row.temporaries == near, row


@pytest.mark.parametrize("name", LAYOUTS)
def test_programs_hold_and_move_what_is_predicted(name: str) -> None:
    for row in compiled(LAYOUTS[name]):
        require_close(row)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_programs_of_more_layouts_hold_and_move_what_is_predicted(name: str) -> None:
    for row in compiled(MORE[name]):
        require_close(row)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["7b", "70b"])
def test_actors_and_critics_of_figure_14_hold_and_move_what_is_predicted(model: str) -> None:
    for each in jobs(model):
        for row in compile_apart(each):
            require_close(row, temporaries=0.3)


def test_a_process_of_its_own_compiles_for_more_devices_and_refuses_what_does_not_fit() -> None:
    scored = a_job(MeshShape(data=4, tensor=4), micros=0)
    (row,) = verify([scored], 1e9)
    require_close(row)
    assert row.program == "scoring"
    assert "scoring" in table([row])
    with pytest.raises(ValueError, match=r"has 0\.00 GB; scoring needs 0\.\d+ GB a device"):
        require_room([replace(row, beside=2e7)], 1e6)


def test_compiling_has_a_deadline() -> None:
    with pytest.raises(TimeoutError, match=r"programs of actor took more than 0\.01 s"):
        compile_apart(LAYOUTS["zero 1"], deadline_s=0.01)


def test_a_job_is_what_an_option_says_of_a_workload() -> None:
    option = Option(
        train=MeshShape(data=2, tensor=4), generate=MeshShape(tensor=2), micro_sequences=4, waves=2
    )
    model = Model(config=CFG, head="lm", trained=True, generates=True)
    work = Workload(prompts=64, prompt_tokens=512, response_tokens=512, updates=4)
    (found,) = verify_jobs("actor", model, option, work)
    assert (found.micros, found.rows, found.prompts) == (4, 4, 32)
    assert found.infer_rows == 2 * pass_rows(32, 1024)
    frozen = replace(model, trained=False, generates=False)
    (reference,) = verify_jobs("reference", frozen, option, work)
    assert (reference.micros, reference.prompts) == (0, 0)
    assert reference.placement.infer == option.train
