"""mla_prolog."""
