"""Code that runs in child processes: the target's framework on a CPU, and the HF oracle.

Nothing here is imported by the parent. A child may run in another interpreter than kvskill's, so these modules
need only the standard library, numpy, torch, safetensors and what the target itself needs.
"""
