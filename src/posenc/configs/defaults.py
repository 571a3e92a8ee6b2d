"""What a model's own code does where its config says nothing.

A ``config.json`` may leave out what is the default of its class, so these are part of what it says.
They were read off the classes of transformers, and the tests read them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def _by_type(groups: dict[T, str]) -> dict[str, T]:
    return {name: value for value, names in groups.items() for name in names.split()}


# Pairs of queries and keys are adjacent channels.
INTERLEAVED = frozenset(
    """
    blt blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher codegen cohere
    cohere2 cohere2_moe deepseek_v2 deepseek_v4 ernie4_5 ernie4_5_moe glm glm4 glm4v glm4v_text
    glm_ocr glm_ocr_text gptj helium llama4 llama4_text moonshine moonshine_streaming
    openai_privacy_filter pe_audio_encoder pe_audio_video_encoder pe_video_encoder roformer
    """.split()
)
# The same, and the result is put out in halves; `rope_interleave` in a config says so, too.
INTERLEAVED_TO_HALVES = frozenset(
    """
    axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k2
    longcat_flash mistral4 mistral_large4 mistral_large4_text youtu
    """.split()
)
# Coordinates of M-RoPE are dealt out pair by pair, not in sections.
DEALT = frozenset(
    """
    cosmos3_edge_text qwen3_5_moe_text qwen3_5_text qwen3_omni_moe_text qwen3_vl_moe_text
    qwen3_vl_text qwen4_exp_text
    """.split()
)

# Keys that say what kind of positions a model has.
KIND_KEYS = ("position_embedding_type", "position_embeddings_type")
# Rotations that no RoPE has, whatever their configs say.
UNLIKE = {
    "chatglm": "half of a head turns, in adjacent pairs, and rope_ratio scales the base",
    **dict.fromkeys(
        ("dinov3_vit", "eomt_dinov3", "sapiens2"), "its coordinates are fractions of an image"
    ),
    **dict.fromkeys(
        ("llama4_vision_model", "pixtral", "sam3_vit_model"),
        "positions are those of an image, see posenc.axes.Axial",
    ),
    "ernie4_5_vl_moe": "its pairs are in an order of their own",
    "ernie4_5_vl_moe_text": "its pairs are in an order of their own",
    "hunyuan_vl_text": "the channels of a pair turn by coordinates that differ",
    "musicflamingo": "its positions are times of an audio",
    "nanochat": "it turns the other way",
}

# A type that is not here, and says nothing of rotation, may well have none.
BASES = _by_type(
    {
        1e3: "nomic_bert",
        1e4: "afmoe arcee aria_text axk1 axk2 bamba beam blt_patcher chameleon clvp_decoder "
        "clvp_encoder codegen cohere2 cohere2_moe dbrx deepseek_ocr2_encoder "
        "deepseek_ocr2_text deepseek_v2 deepseek_v3 deepseek_v32 dia_decoder dia_encoder "
        "diffllama doge dots1 esm esmc eurobert exaone4 exaone_moe falcon falcon_h1 flint "
        "gemma gemma2 glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text "
        "glm_image_text glm_moe_dsa glm_ocr_text glmasr_encoder gpt_neox gpt_neox_japanese "
        "gptj gradium_phonon_tts granite granite4_vision_text granite_swa granitemoe "
        "granitemoe_swa granitemoehybrid granitemoeshared hrm_text hunyuan_v1_dense "
        "hunyuan_v1_moe hy_v4 hyperclovax idefics jais2 jetmoe kimi_k2 kolibri1 "
        "kyutai_speech_to_text lasr_encoder llama mimi mimi_decoder mimi_encoder minicpm3 "
        "ministral mistral molmo2_text moonshine moonshine_streaming moshi muse_glimmer_text "
        "nemotron nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp "
        "nemotron3_diarization_audio neucodec olmo olmo2 olmo_hybrid olmoe persimmon phi phi3 "
        "phi4_multimodal pocket_tts pocket_tts_audio_tokenizer "
        "pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder qwen2 "
        "qwen2_5_omni_dit qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next "
        "qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text qwen3_omni_moe_text "
        "qwen4_exp_text recurrent_gemma roformer seed_oss stablelm starcoder2 t5_gemma_module "
        "timesfm2_5 unlimited_ocr_text vaultgemma voxtral_realtime_encoder "
        "voxtral_realtime_text xcodec2 youtu zamba2",
        2e4: "jina_embeddings_v3 pe_audio_encoder pe_audio_video_encoder pe_video_encoder",
        1e5: "helium",
        1.5e5: "gpt_oss openai_privacy_filter",
        1.6e5: "gte modernbert modernbert-decoder",
        5e5: "bitnet blt_global_transformer blt_local_decoder blt_local_encoder cohere csm "
        "csm_depth_decoder_model ernie4_5 ernie4_5_moe evolla EvollaModel flex_olmo higgs_audio_v2 "
        "llama4_text mllama_text_model muse_glimmer_assistant muse_spark_text olmo3 "
        "paddleocr_vl_text qwen3_vl_moe_text qwen3_vl_text",
        1e6: "cwm emu3_text_model gemma3_text gemma3n_text lfm2 lfm2_moe minimax ministral3 "
        "mixtral phimoe qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text "
        "solar_open",
        2e6: "smollm3",
        5e6: "minimax_m2 minimax_m3_vl_text",
        6e6: "bailing_hybrid",
        1e7: "longcat_flash",
        11158840.0: "hy_v3",
        1.2e7: "apertus",
        1e8: "cosmos3_edge_text",
    }
)
# Bases of layers that see a window alone, and are not scaled; None is that of the others.
LOCAL_BASES: dict[str, float | None] = {
    **dict.fromkeys(("gemma3_text", "gemma3n_text", "modernbert", "modernbert-decoder"), 1e4),
    "olmo3": None,
}
# Channels of a head where they do not follow from the width of the model.
WIDTHS = _by_type(
    {
        64: "gpt_oss muse_spark_text neucodec openai_privacy_filter qwen2_5_omni_dit "
        "voxtral_realtime_encoder xcodec2",
        80: "timesfm2_5",
        128: "afmoe beam cohere2_moe cosmos3_edge_text cwm dia_decoder dia_encoder ernie4_5 flint "
        "glm glm4 helium higgs_audio_v2 hrm_text hy_v3 jetmoe kolibri1 llama4_text mellum "
        "minimax_m2 minimax_m3_vl_text ministral3 molmo2_text muse_glimmer_assistant "
        "muse_glimmer_text paddleocr_vl_text pe_audio_encoder pe_audio_video_encoder "
        "pe_video_encoder qwen2_5_omni_talker qwen3 qwen3_omni_moe_talker_code_predictor "
        "qwen3_vl_text seed_oss solar_open",
        256: "gemma gemma2 gemma3_text gemma3n_text qwen3_5_moe_text qwen3_5_text qwen3_next "
        "qwen4_exp_text t5_gemma_module t5gemma2_decoder t5gemma2_text vaultgemma",
    }
)
# Of those that are rotated, where they are kept apart from the others.
ROTATED_WIDTHS = _by_type(
    {
        32: "axk2 minicpm3",
        64: "axk1 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa "
        "hy_v4 longcat_flash mistral4 mistral_large4_text youtu",
    }
)
# Of a model of the default size, where a file says nothing of it.
USUAL_WIDTHS = dict.fromkeys(("llama", "mistral", "mixtral", "qwen2"), 128)
# Heads of queries and of keys, where files leave even these out.
HEADS = {"gemma3_text": (8, 4)}
# Channels of a head that rotate, where neither a share nor a number is given.
ROTATED = {"codegen": 64, "gptj": 64}
# The share of a head that rotates, where it is not all.
SHARES = _by_type(
    {
        0.25: "gpt_neox qwen3_5_moe_text qwen3_5_text qwen3_next stablelm",
        0.5: "bamba glm glm4 glm4_moe glm4v_moe_text glmasr_encoder minimax_m3_vl_text nemotron "
        "nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp persimmon phi "
        "recurrent_gemma",
        0.8: "moonshine_streaming",
    }
)
# Scaled, or different from layer to layer, unless their configs say otherwise.
SPECIAL = frozenset(
    """
    apertus beam cosmos3_edge_text cwm deepseek_v4 diffusion_gemma_text embedding_gemma2_text
    gemma4_text gemma4_unified_text gpt_oss higgs_audio_v2 laguna mellum mimo_v2_flash ministral3
    mistral4 mistral_large4_text neomme openai_privacy_filter step3p5 t5gemma2_decoder t5gemma2_text
    ultrabert zaya
    """.split()
)


def speaks(config: Mapping[str, Any]) -> bool:
    """Whether any key says that there is rotation; a width with that name may be of none."""
    words = [key for key, value in config.items() if value is not None]
    words += [str(config[key]) for key in KIND_KEYS if config.get(key)]
    named = (str(word) for word in words if word != "qk_rope_head_dim")
    return any("rope" in word or "rotary" in word for word in named)


def unlike(config: Mapping[str, Any]) -> str | None:
    """How the rotation of this type differs from every RoPE."""
    kind = config.get("model_type")
    return UNLIKE.get(kind) if isinstance(kind, str) else None
