"""CPU reference kernels of Ascend operators: obviously right rather than fast.

Written from the operator sheet and the vendor's operator pages; they share no code with templates or with what
they check. `registry.load_kernels()` gives the table; `rules` holds what a device enforces beyond the schema.
Tensors of any float dtype are accepted (float32 and float64 are test devices); arithmetic is float32, or float64
when an input is.
"""
