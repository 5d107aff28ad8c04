"""Weights that stay quantised in memory, as the kernels take them; the house knows them under this name."""

from pallas_kernels.quantized import Format, Quantized, Weight, abstract_quantized, widen

__all__ = ["Format", "Quantized", "Weight", "abstract_quantized", "widen"]
