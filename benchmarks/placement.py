# SPDX-License-Identifier: Apache-2.0
"""The mapper held against what was published; everything SIMULATED, profile eager-2024.

python -m benchmarks.placement points      HybridFlow's points: theirs, ours, verdict
python -m benchmarks.placement grid        its placements from 8 to 128 GPUs; figure 15
python -m benchmarks.placement systems     other systems' configurations against our plans
python -m benchmarks.placement relatives   measured steps of a known plan; our plans beside it
python -m benchmarks.placement all         all four and benchmarks.scaling, as predictions.md
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import relatives as rel
from benchmarks import scaling
from benchmarks.points import T_G, Figure15, given_placements, points
from benchmarks.simulated import (
    ALGORITHMS,
    MOST,
    PROFILE,
    SIZES_FROM,
    TOLERANCE,
    Setting,
    best,
    doubled,
    joined_s,
    near,
    placements,
    spelled,
    standalone,
)
from benchmarks.systems import SYSTEMS
from hfjax.mapping.report import aligned
from hfjax.mapping.search import Plan

NONE = "does not fit"
ALL_SIZES = (8, 16, 24, 32, 48, 64, 96, MOST)
GRID = {  # GPUs from
    Setting("ppo", "7b"): 8,
    Setting("ppo", "13b"): 16,
    Setting("ppo", "34b"): 16,
    Setting("ppo", "70b"): 32,
    Setting("ppo", "13b", "70b"): 32,
}
CLAIMS = {  # speed-ups of figures 9 to 11, sub-captions
    "ppo": {"7b": (1.68, 8.63), "13b": (2.7, 18.96), "34b": (2.41, 20.57), "70b": (5.17, 17.98)},
    "remax": {"7b": (1.53, 2.56), "13b": (2.49, 3.66), "34b": (2.14, 4.8), "70b": (6.46, 9.78)},
    "safe-rlhf": {
        "7b": (1.71, 12.87),
        "13b": (2.49, 18.47),
        "34b": (2.2, 19.76),
        "70b": (4.89, 16.86),
    },
}
PPO_CLAIMS = {  # mean and most
    "DS-Chat": (3.67, 7.84),
    "OpenRLHF": (3.25, 5.93),
    "NeMo-Aligner": (12.52, 20.57),
    "NeMo, KV cache": (12.52, 20.57),
}
UNCACHED, CACHED = "NeMo-Aligner", "NeMo, KV cache"  # as the paper says, and otherwise

Table = list[tuple[str, ...]]


def heading(what: str, device: str = "a100-80g") -> str:
    return f"{what}: SIMULATED, {device}, profile {PROFILE}"


def points_text() -> str:
    """HybridFlow's points."""
    rows = [("point", "theirs", "ours", "verdict")]
    rows += [(p.name, p.theirs, p.ours, p.verdict) for p in points()]
    return f"{heading('HybridFlow §8')}; numbers match within {TOLERANCE:.0%}\n{aligned(rows)}"


def cell(setting: Setting, plan: Plan | None) -> str:
    """Seconds, and thousands of tokens a second."""
    return f"{plan.value:.1f} ({setting.rate(plan.value) / 1e3:.2f})" if plan else "-"


def grid_text(settings: Any = tuple(GRID), sizes: Sequence[int] = ALL_SIZES) -> str:
    """Placements by hand and by the search, under both objectives; then figure 15."""
    text = []
    for objective in ("paper", "time"):
        head = ("models", "GPUs", "colocate", "split", "standalone")
        rows: Table = [(*head, "standalone, best allocation", "best", "which")]
        for setting in settings:
            for gpus in (n for n in sizes if n >= GRID[setting]):
                room = placements(setting, objective, gpus)
                found = best(setting, gpus, objective)
                given = given_placements(setting, gpus).values()
                plans = [room.given(sets, n) if sum(n) <= gpus else None for sets, n in given]
                plans.append(room.allocated(standalone(setting.problem), gpus))
                cells = [cell(setting, plan) for plan in [*plans, found]]
                which = spelled(found) if found else NONE
                rows.append((setting.name, str(gpus), *cells, which))
        what = f"seconds (thousand tokens/s), objective {objective}; -: {NONE}"
        text.append(f"{heading(what)}\n{aligned(rows)}")
    return "\n\n".join([*text, figure_15_text()])


def figure_15_text() -> str:
    """Generation by its tensor parallel size."""
    rows = [("model", *(f"t_g = {t}" for t in T_G))]
    for size in ("7b", "13b"):
        found = [Figure15(size).generation(t) for t in T_G]
        rows.append((size, *(f"{f[1]:.1f} s in {f[0]}" if f else NONE for f in found)))
    what = "generation on 16 GPUs, train 1-8-2, all models colocated, in waves of the KV cache"
    return f"{heading(what)}\n{aligned(rows)}"


def systems_text(
    algorithms: Iterable[str] = tuple(ALGORITHMS),
    sizes: Sequence[str] = tuple(SIZES_FROM),
    most: int = MOST,
) -> str:
    """Iterations of other systems' configurations, and how much faster our plans are."""
    names = list(SYSTEMS)
    rows: Table = [
        ("algorithm", "size", "GPUs", *(f"{n} s" for n in names), "ours, paper", "ours, time")
    ]
    ups: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for algorithm in algorithms:
        for size in sizes:
            setting = Setting(algorithm, size)
            for gpus in (n for n in doubled(SIZES_FROM[size]) if n <= most):
                theirs = {name: SYSTEMS[name](setting, gpus) for name in names}
                ours = ours_s(setting, gpus)
                cells = [f"{it.seconds:.1f}" if it else "-" for it in theirs.values()]
                mine = [f"{s:.1f}" for s in ours] if ours else ["-", "-"]
                rows.append((algorithm, size, str(gpus), *cells, *mine))
                for name, it in theirs.items():
                    if it and ours:
                        both = it.seconds / ours[0], it.seconds / ours[1]
                        ups.setdefault((algorithm, size, name), []).append(both)
    what = f"seconds an iteration; -: {NONE}, or ReMax, which NeMo-Aligner has not"
    parts = [f"{heading(what)}\n{aligned(rows)}", ranges_text(ups)]
    return "\n\n".join([*parts, means_text(ups)])


def ours_s(setting: Setting, gpus: int) -> tuple[float, float] | None:
    """Of the paper's objective's plan, iterations one after another; of our own, overlapping."""
    found, later = (best(setting, gpus, objective) for objective in ("paper", "time"))
    return (joined_s(setting.problem, found), later.seconds) if found and later else None


def ranges_text(ups: dict[tuple[str, str, str], list[tuple[float, float]]]) -> str:
    """Speed-ups by algorithm and size."""
    head = ("algorithm", "size", "theirs", "objective paper", "objective time")
    rows: Table = [(*head, "objective paper, all cached", "verdict")]
    for algorithm, claims in CLAIMS.items():
        for size, (low, high) in claims.items():
            mine = {k[2]: v for k, v in ups.items() if k[:2] == (algorithm, size)}
            if not mine:
                continue
            uncached, cached = (
                [both for name, found in mine.items() if name != without for both in found]
                for without in (CACHED, UNCACHED)
            )
            ranges = [(min(e), max(e)) for e in zip(*uncached, strict=True)]
            ranges.append((min(both[0] for both in cached), max(both[0] for both in cached)))
            spans = [f"{a:.2f} to {b:.2f}" for a, b in ranges]
            verdict = range_verdict(ranges[0], (low, high))
            rows.append((algorithm, size, f"{low} to {high}", *spans, verdict))
    what = f"how many times faster we are than these systems, least to most (cached: {CACHED})"
    return f"{heading(what)}\n{aligned(rows)}"


def range_verdict(ours: tuple[float, float], theirs: tuple[float, float]) -> str:
    """Of both ends."""
    ends = [near(a, b) for a, b in zip(ours, theirs, strict=True)]
    if all(ends):
        return "matched"
    high, low = (f"{a / b:.2f} x" for a, b in zip(ours[::-1], theirs[::-1], strict=True))
    return f"not matched: low end {low}, high end {high} theirs"


def means_text(ups: dict[tuple[str, str, str], list[tuple[float, float]]]) -> str:
    """PPO's mean and most by system."""
    rows: Table = [
        ("PPO against", "theirs, mean (most)", "objective paper", "objective time", "verdict")
    ]
    for name, (mean, most) in PPO_CLAIMS.items():
        found = [both for key, each in ups.items() if key[::2] == ("ppo", name) for both in each]
        if not found:
            continue
        each = [(statistics.mean(e), max(e)) for e in zip(*found, strict=True)]
        spans = [f"{a:.2f} ({b:.2f})" for a, b in each]
        ok = near(each[0][0], mean) and near(each[0][1], most)
        verdict = "matched" if ok else f"not matched: mean {each[0][0] / mean:.2f} x theirs"
        rows.append((name, f"{mean} ({most})", *spans, verdict))
    return f"{heading('how many times faster, all sizes')}\n{aligned(rows)}"


def relatives_text(
    measured: Any = rel.MEASURED, pairs: Any = rel.PAIRS, gpus: Any = rel.GPUS
) -> str:
    """The Heuristic, predicted and measured; then predictions."""
    return "\n\n".join([measured_text(measured), predicted_text(pairs, gpus)])


def measured_text(measured: Sequence[rel.Measured]) -> str:
    """Each measured setting; a decode step's cost is the difference of two lengths."""
    head = ("models", "GPUs", "tokens", "measured s", "predicted s", "error", "within 20 %", "GB")
    rows: Table = [(*head, "fits", "our best s", "ReaL's s", "which is faster")]
    for m in measured:
        setting = rel.setting_of(m.size, m.size, m.length)
        found, ours = rel.heuristic(setting, m.gpus), rel.quickest(setting, m.gpus)
        error = found.seconds / m.heuristic_s - 1
        cells = (f"{m.heuristic_s}", f"{found.seconds:.1f}", f"{error:+.0%}")
        within = "yes" if abs(error) <= rel.SECONDS_WITHIN else "no"
        more = (within, f"{found.bytes / 1e9:.1f}", "yes" if found.fits else "no")
        best_s = ours.seconds if ours else float("inf")
        faster = "ours" if best_s <= m.real_s else "ReaL's: its meshes overlap, measured"
        last = (f"{best_s:.1f}", f"{m.real_s}", faster)
        rows.append((f"{m.size}+{m.size}", str(m.gpus), str(m.length), *cells, *more, *last))
    large = rel.heuristic(rel.setting_of("70b", "70b", rel.LENGTHS[0]), 32)
    note = f"70b+70b colocated on 32: {large.bytes / 1e9:.1f} GB a device, "
    note += "fits" if large.fits else NONE
    what = heading("the Heuristic's step, predicted and measured", rel.DEVICE)
    return "\n".join([what, aligned(rows), note, "", decode_text(measured)])


def decode_text(measured: Sequence[rel.Measured]) -> str:
    """What a token costs."""
    rows = [("models", "GPUs", "measured ms", "predicted ms", "error", "within 25 %")]
    for size, gpus in dict.fromkeys((m.size, m.gpus) for m in measured):
        both = [m for m in measured if (m.size, m.gpus) == (size, gpus)]
        if len(both) < 2:
            continue
        real = rel.decode_s(*(m.heuristic_s for m in both))
        settings = [rel.setting_of(size, size, m.length) for m in both]
        ours = rel.decode_s(*(rel.heuristic(setting, gpus).seconds for setting in settings))
        within = "yes" if abs(ours / real - 1) <= rel.DECODE_WITHIN else "no"
        cells = (f"{1e3 * real:.1f}", f"{1e3 * ours:.1f}", f"{ours / real - 1:+.0%}", within)
        rows.append((f"{size}+{size}", str(gpus), *cells))
    return f"{heading('a decode step: (t(896) - t(128)) / 768', rel.DEVICE)}\n{aligned(rows)}"


def predicted_text(pairs: Sequence[tuple[str, str]], gpus: Sequence[int]) -> str:
    """The Heuristic and our best plan, and what the latter gains."""
    rows = [("actor+critic", "tokens", *(str(n) for n in gpus))]
    gains: list[float] = []
    for actor, critic in pairs:
        for length in rel.LENGTHS:
            setting, cells = rel.setting_of(actor, critic, length), []
            for n in gpus:
                found, ours = rel.heuristic(setting, n), rel.quickest(setting, n)
                cells.append(f"{_fit(found)} / {f'{ours.seconds:.1f}' if ours else '-'}")
                gains += [found.seconds / ours.seconds] if ours and found.fits else []
            rows.append((f"{actor}+{critic}", str(length), *cells))
    what = f"seconds of the Heuristic / of our best plan (objective time) by GPUs; -: {NONE}"
    text = f"{heading(what, rel.DEVICE)}\n{aligned(rows)}"
    if not gains:
        return text
    mean = statistics.mean(gains)
    verdict = "matched" if near(mean, rel.GAIN) else f"not matched: {mean / rel.GAIN:.2f} x theirs"
    return (
        f"{text}\nour best plan is {mean:.2f} times as fast as the Heuristic on average, "
        "simulated; "
        f"ReaL's {rel.GAIN} times, measured: {verdict}"
    )


def _fit(found: rel.Simulated) -> str:
    return f"{found.seconds:.1f}" if found.fits else "-"


PARTS: dict[str, Callable[[], str]] = {
    "points": points_text,
    "grid": grid_text,
    "systems": systems_text,
    "relatives": relatives_text,
}


def all_text() -> str:
    """predictions.md."""
    parts = {f"placement {name}": made for name, made in PARTS.items()}
    return document({name: made() for name, made in (parts | {"scaling": scaling.text}).items()})


def document(texts: Mapping[str, str]) -> str:
    """Each command's tables."""
    lines = [
        "# Predictions of the mapper: SIMULATED, no device ran",
        "",
        "Written by `python -m benchmarks.placement all`, before any comparison with measurements",
        "other than those that its tables name.",
    ]
    for name, text in texts.items():
        lines += ["", f"## `python -m benchmarks.{name}` (simulated)", "", "```text", text, "```"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement")
    parser.add_argument("part", choices=[*PARTS, "all"])
    part = parser.parse_args(arguments).part
    print(all_text() if part == "all" else PARTS[part]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
