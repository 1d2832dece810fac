"""Which draft family a folder holds, by what its config and tensors say; not how any family is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError
from .checkpoint import DraftFolder

_SPECULATORS = {
    "dflash": "dflash",
    "dflash2": "dflash2",
    "dspark": "dspark",
    "eagle3": "eagle3",
    "eagle": "eagle",
    "peagle": "p-eagle",
    "p_eagle": "p-eagle",
    "medusa": "medusa",
    "mtp": "mtp",
    "mlp": "mlp-speculator",
    "mlp_speculator": "mlp-speculator",
}
_PROJECTORS = {"dflash": "dflash", "dspark": "dspark", "domino": "domino", "lilicorr": "lilicorr", "dlite": "dlite"}
_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "Qwen3DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DFlashLagunaForCausalLM": "laguna",
    "MuseGlimmerAssistantModel": "muse assistant",
    "Qwen3DSparkModel": "dspark",
    "Gemma4DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DSparkSpeculator": "dspark",
    "Lfm2DSparkDraftModel": "dspark",
    "K3DSparkForCausalLM": "dspark",
    "DominoDraftModel": "domino",
    "LiLiCorrDraftModel": "lilicorr",
    "DeepseekDFlashDraftModel": "dflash with MLA",
    "KimiK3DFlashDraftModel": "dflash with MLA",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "MedusaModel": "medusa",
    "Gemma4AssistantForCausalLM": "gemma4 assistant",
}
_MODEL_TYPES = {
    "muse_glimmer_assistant": "muse assistant",
    "gemma4_assistant": "gemma4 assistant",
    "gemma4_unified_assistant": "gemma4 assistant",
    "qwen3_5_mtp": "mtp",
    "k3_dspark": "dspark",
}
_TENSORS = (
    (r"lilicorr\.", "lilicorr"),
    (r"candidate_selector\.|layers\.\d+\.(attention|mlp)_conv\.", "dflash2"),
    (r"(logit_head\.)?prefix_gru\.", "domino"),
    (r"(logit_head\.)?(markov_head\.|markov_w\d|confidence_head\.|confidence_proj)", "dspark"),
    (r"aux_hidden_norms\.|layers\.\d+\.self_attn\.g_proj\.", "laguna"),
    (r"layers\.\d+\.self_attn\.kv_(a_proj_with_mqa|b_proj)\.", "dflash with MLA"),
    (r"mask_hidden$", "p-eagle"),
    (r"layers\.\d+\.hidden_norm\.", "eagle3"),
    (r"mtp\.", "mtp"),
    (r"(medusa_head\.)?\d+\.\d+\.linear\.", "medusa"),
    (r"(pre|post)_projection\.|masked_embedding\.", "gemma4 assistant"),
)
"""Tensors that only one family has. Order matters where a family adds to another one's."""
_PLAIN = frozenset(("fc.weight", "hidden_norm.weight", "norm.weight"))
"""What every DFlash backbone has; says DFlash v1 only where nothing else was said."""


@dataclass(frozen=True)
class Recognised:
    """A family and the sign it was recognised by, such as ``architectures: 'DFlashDraftModel'``."""

    family: str
    sign: str


def recognise(folder: DraftFolder) -> Recognised:
    """Ask, in this order: speculators_model_type, projector_type, architectures, model_type, tensor names. Whatever
    answered first, the tensors must agree: another family's head under a plain name would run and be wrong.

    Raises:
        UnsupportedError: nothing known was seen, or config and tensors name different families.
    """
    by_config = _by_config(folder)
    by_tensors = _by_tensors(folder)
    if by_config is None:
        plain = Recognised("dflash", "its tensors") if set(folder.headers) >= _PLAIN else None
        recognised = by_tensors or plain
        if recognised is None:
            raise UnsupportedError(
                f"{folder.config_file}: found architectures {folder.config.get('architectures')!r}, model_type "
                f"{folder.config.get('model_type')!r} and no tensor of a known draft, expected a draft"
            )
        return recognised
    if by_tensors is not None and by_tensors.family != by_config.family:
        raise UnsupportedError(
            f"{folder.path}: found {by_tensors.sign} (of {by_tensors.family}) under {by_config.sign}, expected the "
            f"tensors of {by_config.family}"
        )
    return by_config


def _by_config(folder: DraftFolder) -> Recognised | None:
    config = folder.config
    outer = config.get("speculators_config")
    algorithm = outer.get("algorithm") if isinstance(outer, Mapping) else None
    for key, kind in (
        ("speculators_model_type", config.get("speculators_model_type")),
        ("speculators_config.algorithm", algorithm),
    ):
        if kind is not None:
            return _named(folder, key, kind, _SPECULATORS)
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    if nested.get("projector_type") is not None:
        return _named(folder, "dflash_config.projector_type", nested["projector_type"], _PROJECTORS)
    if nested.get("attention_value_scale") is not None:
        return Recognised("mimo", f"dflash_config.attention_value_scale: {nested['attention_value_scale']!r}")
    if nested.get("shift_label"):
        return Recognised("dspark or domino", f"dflash_config.shift_label: {nested['shift_label']!r}")
    architectures = config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    for name in names:
        if name in _ARCHITECTURES:
            return Recognised(_ARCHITECTURES[name], f"architectures: {name!r}")
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _MODEL_TYPES:
        return Recognised(_MODEL_TYPES[model_type], f"model_type: {model_type!r}")
    if names:
        tensors = _by_tensors(folder)
        sign = f" and {tensors.sign} (of {tensors.family})" if tensors else ""
        raise UnsupportedError(
            f"{folder.config_file}: architectures: found {names!r}{sign}, expected one of "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    return None


def _named(folder: DraftFolder, key: str, value: Any, table: Mapping[str, str]) -> Recognised:
    family = table.get(value) if isinstance(value, str) else None
    if family is None:
        raise UnsupportedError(f"{folder.config_file}: {key}: found {value!r}, expected one of {', '.join(table)}")
    return Recognised(family, f"{key}: {value!r}")


def _by_tensors(folder: DraftFolder) -> Recognised | None:
    for pattern, family in _TENSORS:
        start = re.compile(pattern)
        name = next((name for name in folder.headers if start.match(name)), None)
        if name is not None:
            return Recognised(family, f"tensor {name}")
    return None
