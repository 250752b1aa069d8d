"""Configurations of transformers made small: few layers, narrow, with a small vocabulary.

A configuration is made anew with what the names of its fields say, so that it derives the rest
(sizes of heads, kinds of layers) by itself. There are several *ways* to do so, tried in order: a
number for each name, or all widths divided by one number, which keeps what they are to each other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import transformers as hf

VOCAB, LAYERS, WIDTH = 96, 2, 32
Change = Callable[[Any], Any]

# What a name says of an integer: the first pattern that is the whole name counts.
TOKEN = re.compile(r".*token_?(id|index|idx)s?|.*_(start|end|pad|mask|sep|cls|bos|eos)_id")
KEPT = re.compile(r"num_channels|.*in_(channels|chans)|audio_channels|num_mel_bins|sampling_rate")
LENGTHS: list[tuple[str, int]] = [
    (r"num_kv_shared_layers|num_mtp_layers|num_nextn_predict_layers", 0),
    (r"n_group|topk_group|first_k_dense_replace|decoder_sparse_step", 1),
    (r"(.*_)?(n_layers?|(num_)?(hidden_)?layers|num_hidden_blocks|depth|num_blocks)", LAYERS),
    (r"num_\w+_layers|\w+_layers_num|max_window_layers", LAYERS),
    (r"(\w+_)?codebook_size", 64),  # a power of 2
    (r"(.*_)?vocab_size\w*|num_embeddings|head_out_channels", VOCAB),
    (r"(.*_)?(num_)?(key_value|kv|linear_key)_heads", 2),
    (r"(.*_)?(num_|n_)?(attention_|attn_)?heads?(_\w+)?|\w+_attention_heads|linear_num_\w+", 4),
    (r"(.*_)?(num|n)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_?k\w*|moe_k|num_selects|index_topk", 2),
    (
        r"\w*sliding_window|local_attention|attention_(window|chunk_size)|(chunk|block|context)_size",
        8,
    ),
    (r"(.*_)?max_\w*position\w*|n_positions|num_position_embeddings|max_\w*seq\w*", 64),
    (r"num_queries|num_query_tokens|num_latents|num_denoising|num_object_queries", 8),
    (r"num_conv_pos_embeddings", 16),
]
SIZES: list[tuple[str, int]] = [  # what a way may divide in place
    (r"mamba_(head_dim|d_head)", 16),
    (r"(.*_)?head_(dim|size)|d_kv|attention_head_size|rotary_dim|dim_head", 8),
    (r"(.*_)?lora_rank|\w*_rank|time_step_rank", 16),
    (r"(.*_)?(intermediate|ffn)_(size|dim)|d_ff|n_inner|mlp_dim|ffn_hidden_size|d_inner", 40),
    (
        r"(.*_)?(hidden|embedding|embed|encoder|decoder|model|projection|projector)_(size|dim)",
        WIDTH,
    ),
    (r"\w*(d_model|n_embd|embed_dim|emb_dim|hidden_channels|classifier_proj_size|dim)", WIDTH),
    (r"(\w*_)?(out_channels|output_dim|channels|features?_dim|hidden_sizes?|num_filters)", WIDTH),
]
LISTS = re.compile(r"depths|num_blocks|layers|\w*_depths|layer_repeats|num_(conv_)?layers")
HEADS = re.compile(r"num_heads|num_attention_heads|\w*_heads|n_head")

# What has no default, and must be given (None: as many as there are heads).
NUMBERS = {
    "num_key_value_heads": None,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "vocab_size": VOCAB,
    "prediction_length": 4,
    "context_length": 8,
}
# What some types need besides.
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}
# Types whose sections are not in their configuration.
SECTIONS = ("glm4v_text", "glm4v_moe_text", "glm_image_text", "glm_ocr_text", "glmga_text")


def _bounded(table: Sequence[tuple[str, int]], name: str) -> int | None:
    return next((most for pattern, most in table if re.fullmatch(pattern, name)), None)


def _narrow(values: Sequence[int]) -> Any:
    """Widths of stages, divided by one power of two."""
    factor = 1
    while min(values) // (2 * factor) >= 8 and all(v % (2 * factor) == 0 for v in values):
        factor *= 2
    return type(values)(v // factor for v in values)


def fixed(name: str, value: Any) -> Any:
    """Each name has a number."""
    if isinstance(value, int):
        most = _bounded(SIZES, name)
        return value if most is None else min(value, most)
    return _narrow(value) if min(value) >= 16 else value


def divided(by: int) -> Callable[[str, Any], Any]:
    """All widths are divided by one number, and heads are as many as they were."""

    def change(name: str, value: Any) -> Any:
        if isinstance(value, int):
            sized = _bounded(SIZES, name) is not None
            return value // by if sized and value % by == 0 and value // by >= 2 else value
        if min(value) < 16:
            return value
        return type(value)(v // by if v % by == 0 else v for v in value)

    return change


def unchanged(name: str, value: Any) -> Any:
    return value


# name -> (what becomes of a width, whether heads become fewer, how large an image is)
WAYS: dict[str, tuple[Callable[[str, Any], Any], bool, int]] = {
    "fixed": (fixed, True, 32),
    "a 16th": (divided(16), False, 32),
    "an 8th": (divided(8), False, 64),
    "a quarter": (divided(4), False, 64),
    "whole": (unchanged, False, 64),
}


def read(config: Any, name: str) -> Any:
    """None where it has no such attribute, or another in each layer."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


class Shrinker:
    """Makes configurations small in one way. Token ids beyond the vocabulary get others, the same
    wherever they stand."""

    def __init__(self, way: str) -> None:
        self.width, self.fewer, self.image = WAYS[way]
        self.ids: dict[int, int] = {}

    def config(self, cls: Any, given: dict[str, Any] | None = None) -> Any:
        """``given``: what the configuration around it says of this one."""
        kwargs = dict(given or {})
        for field in dataclasses.fields(cls):
            value = kwargs.get(field.name, field.default)
            if value is dataclasses.MISSING or value is None:
                continue
            changed = self.value(field.name, value)
            if changed != value:
                kwargs[field.name] = changed
        for key, spec in getattr(cls, "sub_configs_defaults", {}).items():
            inner = spec.config_class
            if not issubclass(inner, hf.PreTrainedConfig):
                inner = spec.get_config_class(spec.model_type)
            kwargs[key] = self.config(inner, spec.init_kwargs)
        return self._mended(cls, kwargs)

    def _mended(self, cls: Any, kwargs: dict[str, Any]) -> Any:
        """What has no default gets a number. Kinds of layers: one of each. Sections of a rotary
        embedding: as many as a head has."""
        kwargs = {**kwargs, **OWN.get(cls.model_type, {})}
        config = cls(**kwargs)
        heads = read(config, "num_attention_heads")
        if isinstance(heads, int) and vars(config).get("head_dim", 0) is None:
            kwargs["head_dim"] = config.hidden_size // heads
        for name, number in NUMBERS.items():
            if name in vars(config) and vars(config)[name] is None:
                kwargs[name] = heads or 4 if number is None else number
        kinds = vars(config).get("layer_types")
        if kinds and "layer_types" not in kwargs:
            different = list(dict.fromkeys(getattr(cls(), "layer_types", None) or kinds))
            kwargs["layer_types"] = (different * len(kinds))[: len(kinds)]
        config = cls(**kwargs)
        rope = read(config, "rope_parameters")
        for each in [rope, *rope.values()] if isinstance(rope, dict) else []:
            if isinstance(each, dict) and ("mrope_section" in each or cls.model_type in SECTIONS):
                size = read(config, "head_dim") or config.hidden_size // (heads or 1)
                half = int(size * each.get("partial_rotary_factor", 1.0)) // 2
                old = each.get("mrope_section", [8, 12, 12])
                new = [half * part // sum(old) for part in old]
                each["mrope_section"] = [half - sum(new[1:]), *new[1:]]
                if cls.model_type in SECTIONS:
                    break
        for name in ("use_cache", "use_mambapy", "use_kernels", "return_loss"):
            if read(config, name) is True:
                setattr(config, name, False)
        return config

    def value(self, name: str, value: Any) -> Any:
        if isinstance(value, bool) or KEPT.fullmatch(name):
            return value
        if TOKEN.fullmatch(name):
            many = isinstance(value, (list, tuple))
            return type(value)(map(self.token, value)) if many else self.token(value)
        if "image_size" in name:
            return self._image(value, self.image)
        if re.fullmatch(r"patch_size|\w+_patch_size", name):
            return self._image(value, 8)
        if isinstance(value, int):
            most = _bounded(LENGTHS, name)
            if most is not None and (self.fewer or "head" not in name):
                return min(value, most)
            return self.width(name, value)
        if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
            if LISTS.fullmatch(name):
                return type(value)(min(v, 1) for v in value)
            if HEADS.fullmatch(name):
                return type(value)(min(v, 2) for v in value) if self.fewer else value
            return self.width(name, value)
        return value

    def token(self, value: Any) -> Any:
        if not isinstance(value, int) or value < 8:
            return value
        return self.ids.setdefault(value, VOCAB - 1 - len(self.ids))

    def _image(self, value: Any, most: int) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._image(v, most) for v in value)
        return min(value, most) if isinstance(value, int) else value
