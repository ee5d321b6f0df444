"""Verification: old and new code side by side on a CPU. The only part that imports torch."""
