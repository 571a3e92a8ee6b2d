"""Facts of model types that the classes of transformers do not say, with a reason each."""

from __future__ import annotations

from typing import Any

_GRID = "posenc.positions.grid(rows, columns)"

# What the classes do not say: the reason, the types, and the facts.
BY_HAND: list[tuple[str, str, dict[str, Any]]] = [
    (
        "They rotate, and no key of their configs says so.",
        "clvp_decoder clvp_encoder codegen esm gptj roformer",
        {"rope_theta": 10_000.0},
    ),
    (
        "It has no class: its files are DeepSeek-V3's under another name.",
        "kimi_k2",
        {"rope_theta": 10_000.0, "rope_interleave": True, "qk_rope_head_dim": 64},
    ),
    ("Its functions are methods, which are not tried.", "roformer", {"layout": "interleaved"}),
    ("Its parts have types of their own.", "blt", {"layout": "interleaved"}),
    (
        "Old files are not nested; they scale the layers of full attention alone.",
        "olmo3",
        {"rope_local_base_freq": None},
    ),
    ("Its full layers do not rotate.", "beam", {"rope_theta": 10_000.0}),
    (
        "Models of several inputs publish the text part with nothing but its type.",
        "llama mistral mixtral qwen2",
        {"default_head_dim": 128},
    ),
    (
        "Gemma 3's files leave even these out.",
        "gemma3_text",
        {"num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    (
        "Their classes take it, and keep it by layer.",
        "diffusion_gemma_text embedding_gemma2_text gemma4_text gemma4_unified_text",
        {"global_head_dim": 512},
    ),
    (
        "Without position_embedding_type they do not rotate.",
        "esm granitemoehybrid",
        {"rotary_by_default": False},
    ),
    (
        "Its files have kept the position_embedding_type of another model.",
        "modernbert modernbert-decoder",
        {"ignores_position_embedding_type": True},
    ),
    (
        "Rows and columns are fractions of an image, as no key of their configs says.",
        "dinov3_vit eomt_dinov3 sapiens2",
        {"coordinates": 2, "rope_theta": 100.0},
    ),
    (
        "The class puts 512 where a window is left out.",
        "dots3_note_text",
        {"sliding_window": 512},
    ),
    (
        "The function that interleaves beside its class is that of the text.",
        "dots3_note_audio_encoder",
        {"rope_interleave": False},
    ),
    # The images of models whose rope_type is axial; tests/configs/test_axial.py compares each.
    (
        "Rows, then columns.",
        """
        cohere_compass_vision dots3_note_vision_encoder ernie4_5_vl_moe_vision exaone4_5_vision
        glm4v_moe_vision glm4v_vision glm5_next_vision glm_ocr_vision lfm3_vl_vision
        paddleocr_vl_vision qwen2_5_omni_vision_encoder qwen2_5_vl_vision qwen2_vl_vision
        qwen3_5_moe_vision qwen3_5_vision qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision
        qwen3_vl_vision qwen4_exp_vision video_llama_3_vision
        """,
        {"axial": "runs", "coordinates": 2, "patches": _GRID},
    ),
    (
        "Columns, then rows.",
        "step3p5_vision",
        {"axial": "runs", "coordinates": 2, "patches": f"{_GRID}.flip(0)"},
    ),
    (
        "The same, counted from one.",
        "muse_glimmer_vision muse_spark_vision",
        {
            "axial": "runs",
            "coordinates": 2,
            "patches": "posenc.positions.grid(rows, columns, start=1).flip(0)",
        },
    ),
    (
        "Also frames; channels that three coordinates cannot share do not rotate.",
        "minimax_m3_vl_vision",
        {
            "axial": "runs",
            "coordinates": 3,
            "patches": "posenc.positions.grid(frames, rows, columns)",
        },
    ),
    (
        "Columns, then rows, in adjacent pairs.",
        "edgetam_video sam2_video sam3_tracker_video",
        {"axial": "runs", "coordinates": 2, "layout": "interleaved", "patches": f"{_GRID}.flip(0)"},
    ),
    (
        "The same; the whole image has the range of a window.",
        "sam3_vit_model",
        {
            "axial": "runs",
            "coordinates": 2,
            "layout": "interleaved",
            "patches": f"window_size / columns * {_GRID}.flip(0)",
        },
    ),
    (
        "The same, counted from one after a class token.",
        "inkling2_vision",
        {
            "axial": "runs",
            "coordinates": 2,
            "layout": "interleaved",
            "patches": "posenc.positions.grid(rows, columns, prefix=1, start=1).flip(0)",
        },
    ),
    (
        "Both coordinates share one range of rates.",
        "pixtral",
        {"axial": "shared", "coordinates": 2, "patches": _GRID},
    ),
    (
        "Columns and rows take turns, pair by pair.",
        "kimi_k25_vision",
        {"axial": "alternating", "coordinates": 2, "patches": f"{_GRID}.flip(0)"},
    ),
    # Rotations that no RoPE has, whatever their configs say.
    (
        "It has no class here, and its own code reads its keys in ways of its own.",
        "chatglm",
        {"refused": "half of a head rotates, in adjacent pairs, and rope_ratio scales the base"},
    ),
    (
        "Read in its code.",
        "llama4_vision_model",
        {"refused": "positions are those of an image, see posenc.axes.Axial"},
    ),
    (
        "Read in its code.",
        "gemma4_vision",
        {
            "refused": "each half of a head is RoPE(head_dim // 2, None, rope_theta, "
            "interleaved=False), the first at the column of a patch, the second at its row"
        },
    ),
    (
        "Read in its code.",
        "mlcd mlcd_vision_model",
        {
            "refused": "its patches rotate as RoPE(head_dim, None, rope_theta, interleaved=False, "
            "axes=Axial(2)) at positions.grid(rows, columns), its class token by learned angles"
        },
    ),
    (
        "Read in its code.",
        "ernie4_5_vl_moe ernie4_5_vl_moe_text",
        {"refused": "its pairs are in an order of their own"},
    ),
    (
        "Read in its code.",
        "hunyuan_vl_text",
        {"refused": "the channels of a pair rotate by coordinates that differ"},
    ),
    ("Read in its code.", "musicflamingo", {"refused": "its positions are times of an audio"}),
    ("Read in its code.", "nanochat", {"refused": "it rotates the other way"}),
    # Layers without rotation.
    (
        "Each n-th layer does not rotate.",
        "llama4_text mistral_large4_text smollm3",
        {"no_rope_layer_interval": 4},
    ),
    (
        "Layers of full attention do not rotate.",
        "afmoe cohere2 exaone4 exaone_moe flint",
        {"full_attention_rotates": False},
    ),
    # Weights.
    (
        "tests/interop/test_families.py converts each of them.",
        """
        afmoe apertus arcee aria_text axk1 bamba beam bitnet codegen cohere cohere2 cohere2_moe
        cosmos3_edge_text cwm dbrx deepseek_v2 deepseek_v3 diffllama doge dots1 ernie4_5
        ernie4_5_moe esm esmc eurobert exaone4 exaone_moe falcon falcon_h1 flex_olmo flint gemma
        gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text
        glm_image_text glm_ocr_text gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa
        granitemoe granitemoe_swa granitemoehybrid granitemoeshared gte helium higgs_audio_v2
        hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jina_embeddings_v3 kolibri1 lfm2
        lfm2_moe llama llama4_text mellum minicpm3 minimax_m2 ministral ministral3 mistral mistral4
        mixtral modernbert modernbert-decoder muse_glimmer_text nanochat nemotron nomic_bert olmo
        olmo2 olmo3 olmoe openai_privacy_filter persimmon phi phi3 phimoe qwen2 qwen2_5_vl
        qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text
        qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text recurrent_gemma seed_oss smollm3
        solar_open stablelm starcoder2 ultrabert vaultgemma youtu
        """,
        {"converted": True},
    ),
    (
        "Rows of their fused projection go key head by key head; elsewhere queries, keys, values.",
        "falcon gpt_neox gpt_neox_japanese internlm2 persimmon",
        {"fused": "qkv_grouped"},
    ),
    ("Its rows are in four blocks, made for four devices.", "codegen", {"fused": "qkv_codegen"}),
    (
        "A head of queries is followed by its gate.",
        "qwen3_5_moe_text qwen3_5_text qwen3_next",
        {"gated": True},
    ),
    # Positions that are not rotary; tests/configs/test_non_rotary.py compares them with the models.
    ("Slopes of each model differ.", "bloom mpt", {"positions": "alibi"}),
    ("It has no class here, and its heads no key that is known.", "gpt_refact",
     {"positions": "own_alibi"}),
    (
        "A table whose first position has row 0.",
        """
        albert bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small
        blip_text_model canine clip_text_model convbert distilbert electra ernie fnet gpt2
        gpt_bigcode gpt_neo imagegpt layoutlm layoutlmv2 led megatron-bert mobilebert openai-gpt
        rembert roc_bert siglip_text_model splinter squeezebert vilt visual_bert xlm
        """,
        {"positions": "learned"},
    ),
    (
        "A table whose first position has row pad_token_id + 1.",
        """
        camembert data2vec-text ibert layoutlmv3 lilt longformer luke markuplm mpnet prophetnet
        roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod
        """,
        {"positions": "learned", "offset": "pad_token_id"},
    ),
    (
        "A table with two rows before that of the first position.",
        "bart biogpt mbart mra nystromformer opt plbart trocr yoso",
        {"positions": "learned", "offset": 2},
    ),
    (
        "The table is narrower than the model.",
        "albert convbert electra squeezebert",
        {"embed_dim": "embedding_size"},
    ),
    ("The same.", "rembert", {"embed_dim": "input_embedding_size"}),
    (
        "Encoder and decoder have tables of their own lengths.",
        "speech_to_text whisper",
        {"max_len": {"encoder": "max_source_positions", "decoder": "max_target_positions"}},
    ),
    (
        "The same.",
        "led",
        {
            "max_len": {
                "encoder": "max_encoder_position_embeddings",
                "decoder": "max_decoder_position_embeddings",
            }
        },
    ),
    (
        "Rates are b^(-2i/D).",
        "ctrl marian pegasus",
        {"positions": "sinusoidal", "downscale_freq_shift": 0},
    ),
    (
        "Rates are b^(-i/(D/2 - 1)).",
        "m2m_100 nllb-moe pegasus_x speech_to_text whisper xglm",
        {"positions": "sinusoidal", "downscale_freq_shift": 1},
    ),
    (
        "Fairseq's positions count from pad_token_id + 1.",
        "m2m_100 nllb-moe speech_to_text xglm",
        {"offset": "pad_token_id"},
    ),
    ("Its decoder learns.", "whisper", {"decoder": "learned"}),
    (
        "T5's bias, one number for each head and bucket of distances.",
        "codet5 longt5 mt5 switch_transformers t5 umt5",
        {"positions": "buckets"},
    ),
    ("Read in their code.", "deberta deberta-v2", {"positions": "deberta"}),
    ("tests/nn/test_relative_published.py compares them.", "speecht5", {"positions": "shaw"}),
    (
        "The same. Conformers have sines and cosines in turn.",
        "transfo-xl xlnet",
        {"positions": "transformer_xl"},
    ),
    ("The same.", "fastspeech2_conformer parakeet_encoder",
     {"positions": "transformer_xl", "concatenated": False}),
    (
        "What they have where a file does not say.",
        "seamless_m4t wav2vec2-conformer",
        {"position_embeddings_type": "relative"},
    ),
    (
        "The same.",
        "seamless_m4t_v2 wav2vec2-bert",
        {"position_embeddings_type": "relative_key"},
    ),
    ("Read in their code.", "funnel udop", {"positions": "relative"}),
    (
        "Read in their code.",
        "data2vec-audio hubert unispeech unispeech-sat wav2vec2 wavlm",
        {"positions": "convolution"},
    ),
    ("Read in their code.", "beit data2vec-vision donut-swin maskformer-swin swin swinv2",
     {"positions": "windows"}),
    (
        "Read in their code.",
        """
        blip blip-2 blip_2_vision_model blip_vision_model clip clip_vision_model deit dinov2
        dinov2_with_registers glm_image_vision idefics2_vision idefics3_vision idefics_vision
        instructblip_vision_model instructblipvideo_vision_model internvl_vision
        janus_vision_model minicpm_ocr_vision minicpmv4_6_vision minicpmv4_7_vision molmo2_vision
        ovis2_vision phi4_multimodal_vision qianfan_ocr_vision siglip siglip2_vision_model
        siglip_vision_model smolvlm_vision videomae vit vit_mae
        """,
        {"positions": "patches"},
    ),
    ("Read in their code.", "blip_2_qformer jamba mamba mamba2 nemotron_h rwkv zamba",
     {"positions": "none"}),
]  # fmt: skip
