# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: the inverse frequencies of each scaling recipe, and the half-split rotation."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How positions past the pretraining length are squeezed."""

    kind: str  # one of KINDS
    factor: float  # new length / pretraining length
    original_positions: int = 0  # llama3, yarn: pretraining length
    low_freq_factor: float = 1.0  # llama3: wavelengths above original/low are divided by factor
    high_freq_factor: float = 4.0  # llama3: wavelengths below original/high are kept
    attention_factor: float | None = None  # yarn: scale of sin and cos; None = the paper's
    beta_fast: float = 32.0  # yarn: rotations above which a frequency is kept
    beta_slow: float = 1.0  # yarn: rotations below which it is divided by factor
    mscale: float | None = None  # yarn: with mscale_all_dim, DeepSeek's attention factor
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn: round the ramp's ends outwards to whole dimensions

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"rope scaling kind {self.kind!r} is not supported; use one of {', '.join(KINDS)}, "
                "or none"
            )
        if self.kind != "linear" and self.original_positions <= 0:
            raise ValueError(
                f"rope scaling {self.kind} needs original_positions > 0, "
                f"got {self.original_positions}"
            )
        if not self.factor > 0:
            raise ValueError(f"rope scaling factor must be positive, got {self.factor}")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope scaling llama3 needs high_freq_factor > low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
    """Radians a position of each of head_dim/2 pairs; the factor on sin and cos (1 but for yarn).

    Equal to transformers' ROPE_INIT_FUNCTIONS of the same names.
    """
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return plain.astype(np.float32), 1.0
    if scaling.kind == "linear":
        return (plain / scaling.factor).astype(np.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling).astype(np.float32), 1.0
    return _yarn(plain, theta, scaling).astype(np.float32), _yarn_attention_factor(scaling)


def _llama3(plain: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Keeps short wavelengths, divides long ones by factor, interpolates between."""
    rotations = s.original_positions * plain / (2 * math.pi)
    keep = (rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return plain * (keep + (1.0 - keep) / s.factor)


def _yarn(plain: np.ndarray, theta: float, s: RopeScaling) -> np.ndarray:
    """NTK-by-parts (arXiv 2309.00071): a ramp over dimensions, beta_fast to beta_slow rotations."""
    dim = 2 * len(plain)

    def dimension_of(rotations: float) -> float:
        wavelength = s.original_positions / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension_of(s.beta_fast), dimension_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001  # transformers' guard against 0/0
    divide = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return plain * ((1.0 - divide) + divide / s.factor)


def _yarn_attention_factor(s: RopeScaling) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * weight * math.log(s.factor) + 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return magnitude(s.mscale) / magnitude(s.mscale_all_dim)
    return magnitude(1.0)


def sin_cos(
    positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """Float32 tables (..., 1, head_dim/2) for positions (...): the 1 stands where heads will."""
    frequencies, factor = inverse_frequencies(head_dim, theta, scaling)
    angles = jnp.einsum("...,d->...d", positions.astype(jnp.float32), jnp.asarray(frequencies))
    angles = angles[..., None, :]
    return jnp.sin(angles) * factor, jnp.cos(angles) * factor


def rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    """Rotates pairs (i, i + head_dim/2) of x (..., heads, head_dim), in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
