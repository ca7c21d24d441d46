"""Tiny models that libraries of formats quantize for the tests (tests/data), and what stays plain in all of them."""

IDS = list(range(3, 27))
SMALL = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 1,
}
MOE = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
HYBRID = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
# As the publishers do: heads and what is small stays as it is.
PLAIN = (
    "lm_head",
    "embed_tokens",
    "norm",
    "conv1d",
    "mlp.gate.",
    "shared_expert_gate",
    "in_proj_a",
    "in_proj_b",
)
