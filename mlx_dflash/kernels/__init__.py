"""Launches of the Metal kernels in ``metal_kernels/``, each beside its reference in plain MLX operations.

Knows arrays and no model. There are no kernels yet: every operation of this package runs on MLX's own.
"""
