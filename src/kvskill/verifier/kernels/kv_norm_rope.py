"""kv_norm_rope."""
