# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies against hand arithmetic."""

import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.models.rope import RopeScaling, inverse_frequencies, rotate, sin_cos

LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_positions=64)
PLAIN = 10000.0 ** (-np.arange(8) / 8)


def test_llama3_frequencies() -> None:
    """d=16, base 10000: wavelengths of pairs 0.. are 6.3, 19.9, 62.8, 199, ...; limits 16 and 64.

    Pair 0 is kept, pair 3 on are divided by 8. Pair 1 turns 64/19.87 = 3.2211 times: keep
    (3.2211-1)/3 = 0.74037 of 0.316228, and an eighth of the rest: 0.244385.
    """
    found, factor = inverse_frequencies(16, 10000.0, LLAMA3)
    wanted = [1, 0.244385, 0.0130423, 0.00395285, 0.00125, 3.95285e-4, 1.25e-4, 3.95285e-5]
    np.testing.assert_allclose(found, wanted, rtol=5e-6)  # six digits
    assert factor == 1.0


def test_linear_divides_every_frequency() -> None:
    found, _ = inverse_frequencies(16, 10000.0, RopeScaling(kind="linear", factor=4.0))
    np.testing.assert_allclose(found, PLAIN / 4, rtol=1e-6)


def test_yarn_frequencies() -> None:
    """d=16, base 10000, original 64: dimension of r rotations = 16 ln(64/(2 pi r)) / (2 ln 10000).

    r=32: -0.99, floored and clamped to 0; r=1: 2.016, rounded up to 3. Pairs 0, 1, 2, 3.. are
    divided to parts 0, 1/3, 2/3, 1; the attention factor is 0.1 ln 8 + 1 = 1.2079.
    """
    scaling = RopeScaling(kind="yarn", factor=8.0, original_positions=64)
    found, factor = inverse_frequencies(16, 10000.0, scaling)
    divided = np.array([0, 1 / 3, 2 / 3, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(found, PLAIN * (1 - divided + divided / 8), rtol=1e-6)
    assert factor == pytest.approx(1.2079442)


def test_yarn_attention_factor_from_mscales() -> None:
    scaling = RopeScaling(
        kind="yarn", factor=8.0, original_positions=64, mscale=1.0, mscale_all_dim=0.5
    )
    # (0.1 ln 8 + 1) / (0.05 ln 8 + 1) = 1.2079442 / 1.1039721
    assert inverse_frequencies(16, 10000.0, scaling)[1] == pytest.approx(1.0941801)


def test_rotation_turns_half_split_pairs() -> None:
    """At position 1 the first pair (x0, x2) of d=4 turns by 1 radian: (1, 0) -> (cos 1, sin 1)."""
    sin, cos = sin_cos(jnp.array([[1]]), 4, 10000.0, None)
    turned = rotate(jnp.array([[[[1.0, 0.0, 0.0, 0.0]]]]), sin, cos)
    np.testing.assert_allclose(turned[0, 0, 0], [np.cos(1), 0, np.sin(1), 0], atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "dynamic", "factor": 2.0}, "'dynamic'.*linear, llama3, yarn"),
        ({"kind": "yarn", "factor": 2.0}, "original_positions > 0"),
        ({"kind": "linear", "factor": 0.0}, "factor must be positive"),
        (
            {"kind": "llama3", "factor": 2.0, "original_positions": 8, "high_freq_factor": 1.0},
            "high_freq_factor > low_freq_factor",
        ),
    ],
)
def test_illegal_scalings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling(**settings)
