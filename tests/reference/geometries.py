"""Small configs whose shapes the golden data lacks. Each is a whole `config.json` (nested `text_config`).

=================== ==================================================================================================
`two_full2`         two FULL2 sources, FULL1, three REINDEX layers; candidates hold 16 entries, so from position 16 on
                    the REINDEX layers see less than everything
`released_head`     the release's head (512, rope 64) and index (32 x 128) dims at a small hidden size
`few_candidates`    candidate blocks hold index_topk entries exactly: with a part-filled last block fewer are allowed,
                    and the selection ends in -1
`all_kinds`         FULL2, FULL1, REINDEX and REUSE, an engram and one draft stage in four layers: the quickest to compile
`odd_sizes`         nothing a power of two that need not be: 2 streams, 6 heads in 3 groups, window 5, top-5, 3-gram
                    engram with 3 heads, a REINDEX layer of ratio 2, 2 draft stages of 3 tokens
=================== ==================================================================================================
"""

from .ops import Config, engram_primes

_BASE = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "compress_rope_theta": 160000.0,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 8,
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 8,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 40,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 200,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 319,
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}

_CHANGES = {
    "two_full2": {
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8, 10, 11],
        "candidate_source_layer_id": 6,
        "engram_layer_ids": [1, 4],
        "dspark_target_layer_ids": [9, 10, 11],
    },
    "released_head": {
        "num_attention_heads": 2,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 16,
        "sliding_window": 16,
        "candidate_block_size": 8,
        "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4],
        "candidate_source_layer_id": 3,
        "engram_layer_ids": [1],
        "dspark_target_layer_ids": [3, 4, 5],
    },
    "few_candidates": {
        "candidate_topk_blocks": 2,
        "compress_ratios": [0, 2, 1, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "candidate_source_layer_id": 2,
        "engram_layer_ids": [2],
        "dspark_target_layer_ids": [2, 3, 4],
    },
    "all_kinds": {
        "hc_sinkhorn_iters": 4,
        "compress_ratios": [2, 1, 1, 1, 0],
        "kv_source_layer_ids": [0, 1],
        "index_source_layer_ids": [0, 1, 2],
        "candidate_source_layer_id": 1,
        "engram_layer_ids": [1],
        "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [2, 3],
    },
    "odd_sizes": {
        "vocab_size": 259,
        "hidden_size": 96,
        "moe_intermediate_size": 96,
        "num_attention_heads": 6,
        "head_dim": 96,
        "q_lora_rank": 96,
        "o_groups": 3,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 5,
        "sliding_window": 5,
        "candidate_block_size": 3,
        "candidate_topk_blocks": 3,
        "n_routed_experts": 5,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 5,
        "engram_max_ngram_size": 3,
        "engram_n_heads": 3,
        "engram_compressed_vocab_size": 199,
        "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [1, 4],
        "index_source_layer_ids": [1, 2, 4, 5, 6],
        "candidate_source_layer_id": 4,
        "engram_layer_ids": [0, 3],
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 3,
        "dspark_noise_token_id": 258,
        "dspark_target_layer_ids": [1, 6],
        "dspark_n_routed_experts": 3,
    },
}


def _config(changes: dict) -> dict:
    text = {**_BASE, **changes}
    text["num_hidden_layers"] = len(text["compress_ratios"]) - text["num_nextn_predict_layers"]
    text["engram_num_embeddings"] = [0] * len(text["engram_layer_ids"])
    primes = engram_primes(Config.from_hf(text))
    text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": text["vocab_size"] - 2,
        "text_config": text,
    }


GEOMETRIES: dict[str, dict] = {name: _config(changes) for name, changes in _CHANGES.items()}
