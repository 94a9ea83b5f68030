# SPDX-License-Identifier: Apache-2.0
"""The table between our parameters and Hugging Face's tensors: names, and axes letter by letter."""

import dataclasses
import math

from hfjax.models.llama import ModelConfig

EMBED, TIED_HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCORE, SCORE_BIAS = "score.weight", "score.bias"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter of ours and its tensor in a file, axis by axis in the letters of llama.py.

    `file` separates the tensor's dimensions by commas: 'Hd,D' is (H*d, D). 'o' is one output.
    """

    path: tuple[str, ...]
    ours: str  # letters of our axes, without the stacked L
    name: str  # with {} for the layer where stacked
    file: str

    @property
    def stacked(self) -> bool:
        return self.path[0] == "layers"


LAYER = "model.layers.{}."
LAYER_ENTRIES = (
    ("attn_norm", "D", "input_layernorm.weight", "D"),
    ("mlp_norm", "D", "post_attention_layernorm.weight", "D"),
    ("wq", "DHd", "self_attn.q_proj.weight", "Hd,D"),
    ("wk", "DKd", "self_attn.k_proj.weight", "Kd,D"),
    ("wv", "DKd", "self_attn.v_proj.weight", "Kd,D"),
    ("wo", "HdD", "self_attn.o_proj.weight", "D,Hd"),
    ("w_gate", "DF", "mlp.gate_proj.weight", "F,D"),
    ("w_up", "DF", "mlp.up_proj.weight", "F,D"),
    ("w_down", "FD", "mlp.down_proj.weight", "D,F"),
    ("bq", "Hd", "self_attn.q_proj.bias", "Hd"),
    ("bk", "Kd", "self_attn.k_proj.bias", "Kd"),
    ("bv", "Kd", "self_attn.v_proj.bias", "Kd"),
    ("q_norm", "d", "self_attn.q_norm.weight", "d"),
    ("k_norm", "d", "self_attn.k_norm.weight", "d"),
)
ENTRIES = (
    Entry(("embed",), "VD", EMBED, "V,D"),
    *(Entry(("layers", ours), a, LAYER + name, b) for ours, a, name, b in LAYER_ENTRIES),
    Entry(("final_norm",), "D", "model.norm.weight", "D"),
    Entry(("lm_head",), "DV", TIED_HEAD, "V,D"),
    Entry(("value_head",), "D", SCORE, "o,D"),
    Entry(("value_bias",), "", SCORE_BIAS, "o"),
)


def letter_sizes(cfg: ModelConfig) -> dict[str, int]:
    """Size of each letter's axis; V without padding."""
    return {
        "D": cfg.embed,
        "H": cfg.heads,
        "K": cfg.kv_heads,
        "d": cfg.head_dim,
        "F": cfg.mlp,
        "V": cfg.vocab,
        "o": 1,
    }


def file_shapes(cfg: ModelConfig, entry: Entry) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an entry's tensors in a file."""
    sizes = letter_sizes(cfg)
    shape = tuple(math.prod(sizes[letter] for letter in dim) for dim in entry.file.split(","))
    layers = range(cfg.layers) if entry.stacked else range(1)
    return {entry.name.format(layer): shape for layer in layers}
