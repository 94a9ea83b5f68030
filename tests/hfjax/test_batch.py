# SPDX-License-Identifier: Apache-2.0
"""Batches: joining, selecting, padding, and columns that are futures."""

import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.batch import Batch, Future, Metrics, Piece, assemble


def future(rows: int = 5, log: list[str] | None = None) -> Future:
    """The column 0, 10, 20, ... in two pieces, the second one in reverse order."""
    first, second = np.arange(2) * 10, np.arange(rows - 1, 1, -1) * 10
    pieces = [
        Piece("a", np.arange(2), np.arange(2)),
        Piece("b", np.arange(2, rows), np.arange(rows - 2)[::-1]),
    ]
    store = {"a": first, "b": second}

    def fetch(refs: object, timeout_s: float | None) -> list:
        assert isinstance(refs, list)
        if log is not None:
            log.extend(refs)
        return [store[ref] for ref in refs]

    return Future(pieces, rows, fetch)


def test_join_takes_the_right_sides_columns_and_all_metrics() -> None:
    left = Batch(x=np.arange(3), y=["a", "b", "c"], metrics={"m": 1.0, "left": 1.0})
    right = Batch(x=np.arange(3) + 10, z=np.zeros((3, 2)), metrics={"m": 2.0})
    batch = left | right
    assert batch.names == ("x", "y", "z")
    assert batch["x"].tolist() == [10, 11, 12]
    assert left["x"].tolist() == [0, 1, 2]
    assert batch.metrics.result() == {"m": 2.0, "left": 1.0}
    batch |= {"w": np.ones(3)}
    assert "w" in batch
    assert len(batch) == 3


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"'x': 3, 'y': 2"):
        Batch(x=np.arange(3), y=["a", "b"])
    with pytest.raises(ValueError, match="3 and 2 rows"):
        Batch(x=np.arange(3)) | Batch(y=np.arange(2))


def test_a_missing_column_is_named_with_those_present() -> None:
    with pytest.raises(KeyError, match=r"'values'.*input_ids, length"):
        Batch(input_ids=np.zeros((2, 3)), length=np.zeros(2))["values"]


def test_a_column_is_an_array_or_a_list_never_a_scalar() -> None:
    with pytest.raises(ValueError, match="'x' is float"):
        Batch(x=1.0)
    assert isinstance(Batch(x=jnp.arange(3)).column("x"), np.ndarray)


def test_futures_wait_only_when_read() -> None:
    log: list[str] = []
    batch = Batch(x=future(log=log)) | Batch(y=np.arange(5))
    assert isinstance(batch.column("x"), Future)
    assert log == []
    assert batch["x"].tolist() == [0, 10, 20, 30, 40]
    assert batch["x"].tolist() == [0, 10, 20, 30, 40]
    assert log == ["a", "b"]
    with pytest.raises(ValueError, match="read-only"):
        batch["x"][0] = 1


@pytest.mark.parametrize(
    "number",
    [
        np.array([4, 0]),
        np.array([3, 3, 2]),
        np.array([0, 1]),
        np.zeros(0, int),
        np.array([True, False, True, False, True]),
    ],
)
def test_selecting_rows_of_a_future_is_selecting_rows_of_its_values(number: np.ndarray) -> None:
    log: list[str] = []
    x = np.arange(5) * 10
    selected = Batch(x=future(log=log), y=list("abcde"), z=x).select(number)
    assert log == []
    assert selected["x"].tolist() == selected["z"].tolist() == x[number].tolist()
    assert selected["y"] == np.array(list("abcde"))[number].tolist()


def test_a_selection_reads_only_the_pieces_it_needs() -> None:
    log: list[str] = []
    selected = Batch(x=future(log=log)).select([4, 2]).select([1, 0, 1])
    assert selected["x"].tolist() == [20, 40, 20]
    assert log == ["b"]


def test_selecting_rows_that_are_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="batch of 2"):
        Batch(x=np.arange(2)).select([-1])
    with pytest.raises(ValueError, match="mask of 3"):
        Batch(x=np.arange(2)).select(np.array([True, True, False]))


def test_split_and_concat_are_inverse() -> None:
    batch = Batch(x=future(), y=list("abcde"), z=np.arange(10).reshape(5, 2))
    parts = batch.split(3)
    assert [len(part) for part in parts] == [2, 2, 1]
    whole = Batch.concat(parts)
    for name in batch.names:
        assert np.array_equal(np.asarray(whole[name]), np.asarray(batch[name]))


def test_concat_fills_narrower_rows_at_their_end() -> None:
    whole = Batch.concat([Batch(x=np.ones((1, 2), bool)), Batch(x=np.ones((2, 3), bool))])
    assert whole["x"].tolist() == [[True, True, False], [True] * 3, [True] * 3]
    assert whole["x"].dtype == bool
    with pytest.raises(ValueError, match="different columns"):
        Batch.concat([Batch(x=np.ones(1)), Batch(y=np.ones(1))])


def test_padding_repeats_the_last_row_and_marks_it() -> None:
    padded, valid = Batch(x=future(), y=list("abcde")).pad_to(4)
    assert padded["x"].tolist() == [0, 10, 20, 30, 40, 40, 40, 40]
    assert padded["y"] == list("abcdeeee")
    assert valid.tolist() == [True] * 5 + [False] * 3


def test_columns_keeps_some() -> None:
    batch = Batch(x=np.arange(2), y=np.arange(2), metrics={"m": 1.0})
    assert batch.columns("y").names == ("y",)
    with pytest.raises(KeyError, match="'z'"):
        batch.columns("z")


def test_metrics_wait_only_when_read_and_join_with_dicts() -> None:
    asked: list[float | None] = []

    def source(timeout_s: float | None) -> dict[str, float]:
        asked.append(timeout_s)
        return {"a": 1.0, "b": 1.0}

    metrics = {"z": 0.0, "a": 5.0} | Metrics(source) | {"b": 2.0}
    assert asked == []
    assert metrics.result(3.0) == {"z": 0.0, "a": 1.0, "b": 2.0}
    assert asked == [3.0]
    assert dict(metrics) == metrics.result()


def test_answers_of_unequal_shape_are_refused_with_their_shapes() -> None:
    pieces = [
        Piece(None, np.arange(1), np.zeros(1, int)),
        Piece(None, np.ones(1, int), np.zeros(1, int)),
    ]
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        assemble(pieces, [np.zeros((1, 2)), np.zeros((1, 3))], 2)
