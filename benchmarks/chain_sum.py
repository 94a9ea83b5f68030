# SPDX-License-Identifier: Apache-2.0
"""Writes one-digit sums from reasoning-gym as parquet with verl's columns.

    python -m benchmarks.chain_sum DIR      # DIR/train.parquet and DIR/eval.parquet

Score with hfjax.arithmetic:last_number_reward: the gym's own scorer wants a bare answer.
"""

import sys
from pathlib import Path
from typing import Any

ROWS = {"train": 512, "eval": 64}  # two sets drawn from different seeds may share problems


def rows(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Problems such as 'State the final answer to the following arithmetic problem: 4 + 3 ='."""
    import reasoning_gym

    data = reasoning_gym.create_dataset(
        "chain_sum", size=count, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    return [
        {
            "data_source": "reasoning_gym/chain_sum",
            "prompt": [{"role": "user", "content": item["question"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": item["answer"]},
            "extra_info": {"split": split, "index": index},
        }
        for index, item in enumerate(data)
    ]


def main(folder: str) -> None:
    """Writes both files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    Path(folder).mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(ROWS.items()):
        pq.write_table(pa.Table.from_pylist(rows(split, count, seed)), f"{folder}/{split}.parquet")
    print(f"wrote {' and '.join(f'{folder}/{split}.parquet' for split in ROWS)}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
