"""Layers that split their weights over ranks."""
