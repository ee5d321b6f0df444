"""Verification of standalone runners: old and new runner, driven by their own loops, and HF's greedy text."""
