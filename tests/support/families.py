"""Architectures of ``transformers`` beside those of the zoo, with random weights: models that nothing was fitted on.

Each keeps the defaults of its configuration (dropout too) except for its sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn

from tests.support.zoo import Batch, ZooModule, _images, _tokens


@dataclass(frozen=True)
class Sizes:
    """How large a model is: its width, its layers (of each stage or side), its vocabulary, and its samples."""

    width: int = 64
    layers: int = 2
    vocabulary: int = 128
    tokens: int = 12
    pixels: int = 32
    heads: int = 4


class Contrastive(nn.Module):
    """A model of pairs, which is asked for its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.net(**batch, return_loss=True)


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        model: name of its class in transformers; the configuration is that of the class.
        config: arguments of its configuration, by sizes.
        rows: makes what gives random batches, by sizes.
    """

    model: str
    config: Callable[[Sizes], dict[str, Any]]
    rows: Callable[[Sizes], Callable[[int, torch.Generator], Batch]]

    def build(self, sizes: Sizes) -> ZooModule:
        """The module, with AdamW."""
        kind = getattr(transformers, self.model)
        net = kind(kind.config_class(**self.config(sizes)))
        return ZooModule(Contrastive(net) if self.model == "CLIPModel" else net, self.rows(sizes))


def _texts(sizes: Sizes) -> Callable[[int, torch.Generator], Batch]:
    return _tokens(sizes.vocabulary, sizes.tokens)


def _pictures(sizes: Sizes) -> Callable[[int, torch.Generator], Batch]:
    return _images(sizes.pixels, 2)


def _pairs(sizes: Sizes) -> Callable[[int, torch.Generator], Batch]:
    """Texts with pictures."""

    def rows(batch_size: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(3, sizes.vocabulary, (batch_size, sizes.tokens), generator=generator)
        images = torch.randn(batch_size, 3, sizes.pixels, sizes.pixels, generator=generator)
        return {"input_ids": ids, "pixel_values": images}

    return rows


def _speech(sizes: Sizes) -> Callable[[int, torch.Generator], Batch]:
    """Waves with what is said in them."""

    def rows(batch_size: int, generator: torch.Generator) -> Batch:
        waves = torch.randn(batch_size, 400 * sizes.tokens, generator=generator)
        return {"input_values": waves, "labels": torch.randint(1, 32, (batch_size, 4), generator=generator)}

    return rows


def _spectra(sizes: Sizes) -> Callable[[int, torch.Generator], Batch]:
    def rows(batch_size: int, generator: torch.Generator) -> Batch:
        spectra = torch.randn(batch_size, 80, 4 * sizes.tokens, generator=generator)
        labels = torch.randint(0, sizes.vocabulary, (batch_size, sizes.tokens), generator=generator)
        return {"input_features": spectra, "labels": labels}

    return rows


def _bert(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": 4 * sizes.width,
        "max_position_embeddings": sizes.tokens + 4,
    }


def _llama(sizes: Sizes) -> dict[str, Any]:
    own = {"num_key_value_heads": 2, "head_dim": sizes.width // sizes.heads, "use_cache": False}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return _bert(sizes) | {"intermediate_size": 3 * sizes.width} | own | special


def _gpt(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocabulary,
        "n_embd": sizes.width,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_positions": sizes.tokens,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _bart(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocabulary,
        "d_model": sizes.width,
        **{f"{side}_layers": sizes.layers for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": sizes.heads for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 4 * sizes.width for side in ("encoder", "decoder")},
        "max_position_embeddings": sizes.tokens,
        "use_cache": False,
    }


def _t5(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocabulary,
        "d_model": sizes.width,
        "d_kv": sizes.width // sizes.heads,
        "d_ff": 3 * sizes.width,
        "num_layers": sizes.layers,
        "num_heads": sizes.heads,
        "decoder_start_token_id": 0,
        "use_cache": False,
    }


def _vit(sizes: Sizes) -> dict[str, Any]:
    own = {"image_size": sizes.pixels, "patch_size": 8}
    return {name: value for name, value in _bert(sizes).items() if "vocab" not in name and "position" not in name} | own


def _stages(sizes: Sizes) -> dict[str, Any]:
    """Four stages that double the width."""
    widths = [sizes.width // 2 * 2**stage for stage in range(4)]
    return {"hidden_sizes": widths, "depths": [1, 1, sizes.layers, 1], "image_size": sizes.pixels}


def _without(config: Callable[[Sizes], dict[str, Any]], *names: str, **more: Any) -> Callable[[Sizes], dict[str, Any]]:
    """``config`` without some arguments, and with others."""
    return lambda sizes: {name: value for name, value in config(sizes).items() if name not in names} | more


def _heard(sizes: Sizes) -> dict[str, Any]:
    """Wav2vec2's and its kin's; each rank leaves out layers by itself unless ``layerdrop`` is 0."""
    own = {"conv_dim": [sizes.width] * 3, "conv_stride": [5, 4, 4], "conv_kernel": [10, 4, 4], "vocab_size": 32}
    more = {"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    return _without(_bert, "max_position_embeddings")(sizes) | own | more | {"layerdrop": 0.0, "mask_time_length": 2}


def _clip(sizes: Sizes) -> dict[str, Any]:
    text = _bert(sizes) | {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    return {"text_config": text, "vision_config": _vit(sizes), "projection_dim": sizes.width}


def _mobile(sizes: Sizes) -> dict[str, Any]:
    return {"image_size": sizes.pixels, "depth_multiplier": sizes.width / 64}


def _distilbert(sizes: Sizes) -> dict[str, Any]:
    own = {"dim": sizes.width, "hidden_dim": 4 * sizes.width, "n_layers": sizes.layers, "n_heads": sizes.heads}
    return own | {"vocab_size": sizes.vocabulary, "max_position_embeddings": sizes.tokens}


def _segformer(sizes: Sizes) -> dict[str, Any]:
    return {"hidden_sizes": [sizes.width // 2 * 2**stage for stage in range(4)], "depths": [sizes.layers] * 4}


def _albert(sizes: Sizes) -> dict[str, Any]:
    return _bert(sizes) | {"embedding_size": sizes.width // 2}


def _neo(sizes: Sizes) -> dict[str, Any]:
    own = {"num_layers": sizes.layers, "num_heads": sizes.heads, "attention_types": [[["global"], sizes.layers]]}
    special = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return _without(_bert, "num_hidden_layers", "num_attention_heads")(sizes) | own | special


def _whisper(sizes: Sizes) -> dict[str, Any]:
    own = {"max_source_positions": 2 * sizes.tokens, "max_target_positions": sizes.tokens, "decoder_start_token_id": 1}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "begin_suppress_tokens": None}
    return _without(_bart, "max_position_embeddings")(sizes) | own | special


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES = {
    "albert": Family("AlbertForMaskedLM", _albert, _texts),
    "electra": Family("ElectraForMaskedLM", _albert, _texts),
    "roberta": Family("RobertaForMaskedLM", _bert, _texts),
    "deberta": Family("DebertaForMaskedLM", _bert, _texts),
    "deberta-v2": Family(
        "DebertaV2ForMaskedLM",
        _without(_bert, relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=8),
        _texts,
    ),
    "distilbert": Family("DistilBertForMaskedLM", _distilbert, _texts),
    "mpnet": Family("MPNetForMaskedLM", _bert, _texts),
    "modernbert": Family("ModernBertForMaskedLM", _without(_bert, **_SPECIAL, cls_token_id=1, sep_token_id=2), _texts),
    "funnel": Family(
        "FunnelForMaskedLM",
        lambda sizes: {
            "vocab_size": sizes.vocabulary,
            "d_model": sizes.width,
            "block_sizes": [1] * sizes.layers,
            "n_head": sizes.heads,
            "d_head": sizes.width // sizes.heads,
            "d_inner": 4 * sizes.width,
        },
        _texts,
    ),
    "xlnet": Family(
        "XLNetLMHeadModel",
        lambda sizes: {
            "vocab_size": sizes.vocabulary,
            "d_model": sizes.width,
            "n_layer": sizes.layers,
            "n_head": sizes.heads,
            "d_inner": 4 * sizes.width,
        },
        _texts,
    ),
    "gpt-neo": Family("GPTNeoForCausalLM", _neo, _texts),
    "gptj": Family("GPTJForCausalLM", _without(_gpt, rotary_dim=8), _texts),
    "opt": Family("OPTForCausalLM", _without(_bert, "intermediate_size", ffn_dim=256, use_cache=False), _texts),
    "bloom": Family(
        "BloomForCausalLM",
        lambda sizes: {
            "vocab_size": sizes.vocabulary,
            "hidden_size": sizes.width,
            "n_layer": sizes.layers,
            "n_head": sizes.heads,
            "use_cache": False,
        },
        _texts,
    ),
    "falcon": Family("FalconForCausalLM", _without(_bert, "intermediate_size", **_SPECIAL, use_cache=False), _texts),
    "qwen2": Family("Qwen2ForCausalLM", _llama, _texts),
    "qwen3": Family("Qwen3ForCausalLM", _llama, _texts),
    "qwen2-moe": Family(
        "Qwen2MoeForCausalLM",
        _without(_llama, num_experts=4, moe_intermediate_size=64, shared_expert_intermediate_size=64),
        _texts,
    ),
    "gemma": Family("GemmaForCausalLM", _llama, _texts),
    "gemma2": Family("Gemma2ForCausalLM", _llama, _texts),
    "phi": Family("PhiForCausalLM", _llama, _texts),
    "phi3": Family("Phi3ForCausalLM", _llama, _texts),
    "mistral": Family("MistralForCausalLM", _llama, _texts),
    "stablelm": Family("StableLmForCausalLM", _llama, _texts),
    "olmo": Family("OlmoForCausalLM", _llama, _texts),
    "mamba": Family(
        "MambaForCausalLM",
        lambda sizes: {
            "vocab_size": sizes.vocabulary,
            "hidden_size": sizes.width,
            "num_hidden_layers": sizes.layers,
            "use_cache": False,
        },
        _texts,
    ),
    "mt5": Family("MT5ForConditionalGeneration", _t5, _texts),
    "switch": Family(
        "SwitchTransformersForConditionalGeneration",
        lambda sizes: _t5(sizes) | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        _texts,
    ),
    "bart": Family("BartForConditionalGeneration", _bart, _texts),
    "pegasus": Family("PegasusForConditionalGeneration", _bart, _texts),
    "deit": Family("DeiTForImageClassification", _vit, _pictures),
    "beit": Family("BeitForImageClassification", _without(_vit, drop_path_rate=0.0), _pictures),
    "dinov2": Family("Dinov2ForImageClassification", _without(_vit, "intermediate_size"), _pictures),
    "swinv2": Family(
        "Swinv2ForImageClassification",
        lambda sizes: {
            "image_size": sizes.pixels,
            "patch_size": 4,
            "embed_dim": sizes.width // 2,
            "depths": [sizes.layers, sizes.layers],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
        _pictures,
    ),
    "convnext": Family("ConvNextForImageClassification", _stages, _pictures),
    "hf-resnet": Family(
        "ResNetForImageClassification",
        lambda sizes: _without(_stages, "image_size")(sizes) | {"embedding_size": sizes.width // 2},
        _pictures,
    ),
    "regnet": Family(
        "RegNetForImageClassification",
        lambda sizes: (
            _without(_stages, "image_size")(sizes)
            | {"embedding_size": sizes.width // 2, "groups_width": sizes.width // 4}
        ),
        _pictures,
    ),
    "mobilenet-v2": Family("MobileNetV2ForImageClassification", _mobile, _pictures),
    "segformer": Family(
        "SegformerForImageClassification", lambda sizes: _segformer(sizes) | {"drop_path_rate": 0.0}, _pictures
    ),
    "clip": Family("CLIPModel", _clip, _pairs),
    "wav2vec2": Family("Wav2Vec2ForCTC", _heard, _speech),
    "hubert": Family("HubertForCTC", _heard, _speech),
    "whisper": Family("WhisperForConditionalGeneration", _whisper, _spectra),
}
"""By name."""


def build(name: str, sizes: Sizes | None = None, **more: Any) -> ZooModule:
    """The module of a family, always with the same values.

    Args:
        name: the family.
        sizes: how large.
        **more: what takes the place of its configuration's arguments.
    """
    family = FAMILIES[name]
    torch.manual_seed(1)
    return replace(family, config=lambda sizes: family.config(sizes) | more).build(sizes or Sizes())
