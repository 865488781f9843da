"""Named geometries: `flash` (the release) and `tiny` (every mechanism of the release, small enough for two cores)."""

from dsv41_jax.config import ModelConfig

FLASH = ModelConfig()

TINY = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=8,
    num_attention_heads=4,
    head_dim=64,
    qk_rope_head_dim=32,
    q_lora_rank=64,
    o_lora_rank=32,
    o_groups=2,
    max_position_embeddings=4096,
    original_max_position_embeddings=256,
    n_routed_experts=16,
    num_experts_per_tok=3,
    sliding_window=16,
    compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0),
    kv_source_layer_ids=(2, 4),
    index_source_layer_ids=(2, 4, 6),
    index_n_heads=8,
    index_head_dim=64,
    index_topk=16,
    candidate_source_layer_id=4,
    candidate_topk_blocks=8,
    candidate_block_size=4,
    engram_layer_ids=(1, 4),
    engram_num_embeddings=(1172, 1392),
    engram_vocab_size=180,
    engram_n_heads=2,
    engram_head_dim=32,
    engram_compressed_vocab_size=411,
    dspark_noise_token_id=511,
    dspark_target_layer_ids=(5, 6, 7),
    dspark_markov_rank=32,
    dspark_n_routed_experts=8,
    dspark_num_experts_per_tok=2,
    image_token_id=506,
)

PRESETS = {"flash": FLASH, "tiny": TINY}
