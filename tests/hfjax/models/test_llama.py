# SPDX-License-Identifier: Apache-2.0
"""The model's own promises: decoding equals teacher forcing, padding is invisible, init is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfjax.models.llama import (
    K_MASK,
    KVCache,
    ModelConfig,
    Params,
    abstract_params,
    decode_step,
    hidden_states,
    init_params,
    lm_logits,
    prefill,
    scalar_head,
)
from meshes.layouts import check, generate_layout, shardings, train_layout
from meshes.mesh import MeshShape, make_mesh
from tests.fixtures import slow_but, tiny_config

VARIANTS = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "tied": {"tied": True},
}
GARBAGE = 7.0  # finite content of cache slots that no token has been written to


def _params(cfg: ModelConfig, head: str = "lm", dtype: str = "float32") -> Params:
    """Random everywhere: initial zeros and ones would hide a bias or norm left out."""
    shapes, _ = abstract_params(cfg, head, dtype)
    leaves, tree = jax.tree.flatten(shapes)
    drawn = [jax.random.normal(jax.random.key(i), x.shape) * 0.2 for i, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, [x.astype(dtype) for x in drawn])


def _tokens(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, 96)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("n", slow_but([1, 3], 3))
def test_decoding_equals_teacher_forcing(variant: str, n: int) -> None:
    cfg = tiny_config(**VARIANTS[variant])
    params, lengths, steps = _params(cfg), [5, 1, 3], 4
    prompts_BP, responses_BnR = _tokens(3, 5), _tokens(3, n, steps, seed=1)
    _, prompt = prefill(cfg, params, prompts_BP)
    rows = (cfg.layers, 3, n, cfg.kv_heads)
    cache = KVCache(
        k_LBKdS=jnp.full((*rows, cfg.head_dim, steps), GARBAGE),
        v_LBKSd=jnp.full((*rows, steps, cfg.head_dim), GARBAGE),
    )
    step = jax.jit(lambda *args: decode_step(cfg, params, *args))
    decoded = []
    for t in range(steps):
        token_Bn = responses_BnR[:, :, t]
        x_BnD, cache = step(token_Bn, prompt, jnp.array(lengths), cache, jnp.int32(t))
        decoded.append(x_BnD)
    for b, length in enumerate(lengths):
        for i in range(n):
            row_T = jnp.concatenate([prompts_BP[b, :length], responses_BnR[b, i]])
            forced_RD = hidden_states(cfg, params, row_T[None])[0, length:]
            found_RD = jnp.stack([x_BnD[b, i] for x_BnD in decoded])
            np.testing.assert_allclose(found_RD, forced_RD, atol=2e-5)


def test_prefill_is_the_forward_pass() -> None:
    cfg = tiny_config()
    params, tokens_BP = _params(cfg), _tokens(2, 5)
    x_BPD, cache = prefill(cfg, params, tokens_BP)
    np.testing.assert_array_equal(x_BPD, hidden_states(cfg, params, tokens_BP))
    assert cache.k_LBKdS.shape == (2, 2, 4, 6, 5)
    assert cache.v_LBKSd.shape == (2, 2, 4, 5, 6)


def test_what_follows_a_token_does_not_change_it() -> None:
    cfg = tiny_config()
    params, tokens_BT = _params(cfg), _tokens(2, 7)
    short_BTD = hidden_states(cfg, params, tokens_BT[:, :4])
    other_BT = tokens_BT.at[:, 4:].set(0)
    for row_BT in (tokens_BT, other_BT):
        found_BTD = hidden_states(cfg, params, row_BT)[:, :4]
        np.testing.assert_allclose(found_BTD, short_BTD, atol=1e-5)


@pytest.mark.parametrize("remat", ["dots", "layer"])
def test_rematerialisation_changes_no_gradient(remat: str) -> None:
    cfg = tiny_config()
    params, tokens_BT = _params(cfg), _tokens(2, 5)

    def loss(params: Params, remat: str) -> jax.Array:
        return jnp.sum(jnp.sin(hidden_states(cfg, params, tokens_BT, remat=remat)))

    wanted = jax.grad(loss)(params, "none")
    found = jax.grad(loss)(params, remat)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), found, wanted)


def test_unknown_remat_and_head_are_refused() -> None:
    cfg = tiny_config()
    with pytest.raises(ValueError, match=r"remat='all'.*'none', 'dots' or 'layer'"):
        hidden_states(cfg, _params(cfg), _tokens(1, 2), remat="all")
    with pytest.raises(ValueError, match=r"head='reward'.*'lm', 'value' or 'score'"):
        abstract_params(cfg, "reward")


@pytest.mark.parametrize("tied", [False, True])
def test_phantom_vocabulary_carries_no_probability(tied: bool) -> None:
    """Zero head, V=11 padded to 12: each real token has log-probability -ln 11 = -2.39790."""
    cfg = tiny_config(vocab=11, vocab_multiple=4, tied=tied)
    params = init_params(cfg, "lm", jax.random.key(0))
    name = "embed" if tied else "lm_head"
    flat = params | {name: jnp.zeros_like(params[name])}
    logits_BTV = lm_logits(cfg, flat, hidden_states(cfg, params, jnp.zeros((1, 2), int)))
    assert logits_BTV.shape == (1, 2, 12)
    assert float(logits_BTV[0, 0, 11]) == pytest.approx(K_MASK)
    logp_BTV = jax.nn.log_softmax(logits_BTV)
    np.testing.assert_allclose(logp_BTV[..., :11], -2.39790, atol=1e-5)


def test_padding_the_vocabulary_changes_no_drawn_number() -> None:
    plain = init_params(tiny_config(vocab=90), "lm", jax.random.key(0))
    padded = init_params(tiny_config(vocab=90, vocab_multiple=8), "lm", jax.random.key(0))
    np.testing.assert_array_equal(padded["embed"][:90], plain["embed"])
    np.testing.assert_array_equal(padded["lm_head"][:, :90], plain["lm_head"])
    assert not padded["embed"][90:].any()
    assert not padded["lm_head"][:, 90:].any()


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("make_layout", [train_layout, generate_layout])
def test_init_is_bitwise_equal_in_every_layout(head: str, make_layout) -> None:
    cfg = tiny_config(vocab=90, vocab_multiple=8)
    shape = MeshShape(fsdp=2, tensor=2, tensor_micro=2)
    mesh, layout = make_mesh(jax.devices(), shape), make_layout(shape, kv_heads=cfg.kv_heads)
    shapes, axes = abstract_params(cfg, head)
    check(mesh, layout, shapes, axes)
    sharded = init_params(cfg, head, jax.random.key(1), shardings(mesh, layout, axes))
    whole = init_params(cfg, head, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, sharded, whole)
    spread = sharded["layers"]["wq"].sharding
    assert spread == shardings(mesh, layout, axes)["layers"]["wq"]


def test_a_new_value_head_says_zero_and_a_bias_is_added() -> None:
    cfg = tiny_config(head_bias=True)
    params = init_params(cfg, "value", jax.random.key(0))
    x_BTD = hidden_states(cfg, params, _tokens(2, 3))
    assert not scalar_head(params, x_BTD).any()
    np.testing.assert_array_equal(
        scalar_head(params | {"value_bias": jnp.float32(0.5)}, x_BTD), 0.5
    )


def test_bfloat16_parameters_give_bfloat16_states_and_float32_logits() -> None:
    cfg = tiny_config()
    params = _params(cfg, dtype="bfloat16")
    x_BTD = hidden_states(cfg, params, _tokens(2, 3))
    assert x_BTD.dtype == jnp.bfloat16
    assert lm_logits(cfg, params, x_BTD).dtype == jnp.float32
    whole = hidden_states(cfg, _params(cfg), _tokens(2, 3))
    np.testing.assert_allclose(x_BTD.astype(jnp.float32), whole, atol=0.2)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=8"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"layers": 0}, "layers must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(over: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**over)
