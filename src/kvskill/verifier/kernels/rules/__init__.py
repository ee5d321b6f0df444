"""Rules that the device enforces and the Meta kernels do not, as data by profile."""
