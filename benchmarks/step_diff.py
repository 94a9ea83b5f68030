# SPDX-License-Identifier: Apache-2.0
"""How far each algorithm's step is from PPO's, in lines, beside the paper's claim (HybridFlow §6).

    python -m benchmarks.step_diff

Lines are those of the source without the docstring; a form under settings has one line a statement,
with the branches that those settings take. Exit status 1 where a claim fails.
"""

import ast
import difflib
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from hfjax.algorithm import algorithm_names, load_algorithm

SOURCE, FIVE_MODELS = "source", "cost_critic=False"
FORMS: dict[str, dict[str, Any] | None] = {SOURCE: None, "default": {}}  # None: as it stands
MORE = {"safe_rlhf": {FIVE_MODELS: {"cost_critic": False}}}
CLAIMS = {
    ("safe_rlhf", FIVE_MODELS): "the paper's: PPO and about 5 lines",
    ("safe_rlhf", SOURCE): "its authors' as well: a critic of costs, a loss on texts",
    ("remax", SOURCE): "the paper's: PPO, one generation more, without the critic's lines",
}
MOST_ADDED = 5


class Branches(ast.NodeTransformer):
    """Leaves only the branches that a step takes under `cfg`."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def _taken(self, node: Any) -> Any:
        self.generic_visit(node)
        test = compile(ast.Expression(node.test), "<step>", "eval")
        return node.body if eval(test, {"cfg": self.cfg}) else node.orelse

    visit_If = visit_IfExp = _taken


def lines(name: str, settings: dict[str, Any] | None = None) -> list[str]:
    """The body of an algorithm's step: its source, or what it does under settings."""
    module = load_algorithm(name)
    source = inspect.getsource(module.step)
    step: Any = ast.parse(source).body[0]
    if settings is None:
        return [line[4:] for line in source.splitlines()[step.body[1].lineno - 1 :]]
    taken = Branches(module.Settings(**settings)).visit(step)
    return [ast.unparse(statement) for statement in taken.body[1:]]


def changes(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """The whole of both as a unified diff, without its head."""
    return list(difflib.unified_diff(one, other, lineterm="", n=99))[3:]


def main() -> int:
    """Prints counts of all algorithms, then the diffs beside the claims; 1 where one fails."""
    print(f"{'step of':12} {'form':18} lines  added  removed, against PPO's")
    diffs: dict[tuple[str, str], list[str]] = {}
    for name in sorted(algorithm_names(), key=lambda name: name != "ppo"):
        for form, settings in (FORMS | MORE.get(name, {})).items():
            mine = lines(name, settings)
            diffs[name, form] = diff = changes(lines("ppo", settings and {}), mine)
            added, removed = (sum(line[0] == sign for line in diff) for sign in "+-")
            print(f"{name:12} {form:18} {len(mine):5} {added:6} {removed:8}")
    for (name, form), claim in CLAIMS.items():
        print(f"\n{name}, {form}: {claim}", *diffs[name, form], sep="\n  ")
    five, remax = diffs["safe_rlhf", FIVE_MODELS], diffs["remax", SOURCE]
    added = sum(line[0] == "+" for line in five)
    more = sum((line[0] == "+") - (line[0] == "-") for line in remax if "generate_" in line)
    without = all(line[0] == "-" for line in remax if "critic" in line)
    return 0 if added <= MOST_ADDED and more == 1 and without else 1


if __name__ == "__main__":
    sys.exit(main())
