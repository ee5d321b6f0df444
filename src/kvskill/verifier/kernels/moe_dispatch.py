"""moe_dispatch."""
