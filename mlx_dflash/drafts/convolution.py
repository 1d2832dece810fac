"""Grouped dynamic convolutions over a block's rows, around attention and MLP: what DFlash 2 adds to the backbone.

Source: z-lab/dflash (``dflash/model.py``, DFlash 2). The rows convolved are the block's, from the anchor on; the
context is never reached, and its keys and values are projected from features that were not convolved.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from .backbone import Layer, Masks
from .config import DraftConfig
from .context import LayerContext
from .keys import ConfigKeys, nested
from .layout import LayerLayout

KEEP_FLOAT = ("attention_conv", "mlp_conv")
"""Modules that publishers leave in float when they quantise."""


@dataclass(frozen=True)
class Kernel:
    """``conv_kernel_size`` taps; ``conv_group_size`` neighbouring channels share what the input adds to a tap."""

    taps: int
    group: int


def read_kernel(keys: ConfigKeys, hidden: int) -> Kernel:
    """Both keys of the convolutions.

    Raises:
        ConfigError: one is missing, or the groups do not divide the width.
    """
    taps = keys.size("conv_kernel_size", nested("conv_kernel_size"))
    group = keys.size("conv_group_size", nested("conv_group_size"))
    if hidden % group:
        raise keys.wrong(keys.sources["conv_group_size"], group, f"a divisor of hidden_size ({hidden})")
    return Kernel(taps, group)


class GroupedConvolution(nn.Module):
    """Two causal convolutions whose kernels depend on the sub-layer's input: one before it, one after.

    Attributes:
        base_kernel: ``[2, taps, H]``; the first index says before or after.
        kernel_projection: gives what each row adds to its own kernels, one number a group: ``[2 taps H / group, H]``.
    """

    def __init__(self, hidden: int, kernel: Kernel) -> None:
        super().__init__()
        self._taps, self._group = kernel.taps, kernel.group
        self.base_kernel = mx.zeros((2, kernel.taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * kernel.taps * (hidden // kernel.group), bias=False)

    def prepare(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """``[1, rows, H]``, the normed input -> the sub-layer's input, and the kernel for :meth:`finish`."""
        added = self.kernel_projection(x).reshape(1, x.shape[1], 2, self._taps, -1)
        return self._convolve(x, added[:, :, 0], 0), added[:, :, 1]

    def finish(self, x: mx.array, added: mx.array) -> mx.array:
        """``[1, rows, H]``, the sub-layer's output -> what is added to the residual stream."""
        return self._convolve(x, added, 1)

    def _convolve(self, x: mx.array, added: mx.array, side: int) -> mx.array:
        total = mx.zeros_like(x)
        rows = x.shape[1]
        for tap in range(min(self._taps, rows)):
            earlier = mx.pad(x[:, : rows - tap], [(0, 0), (tap, 0), (0, 0)])
            kernel = self.base_kernel[side, tap] + mx.repeat(added[:, :, tap], self._group, axis=-1)
            total = total + kernel * earlier
        return total


class ConvolvedLayer(Layer):
    """A backbone layer with convolutions around both of its halves."""

    def __init__(self, config: DraftConfig, layout: LayerLayout, kernel: Kernel) -> None:
        super().__init__(config, layout)
        self.attention_conv = GroupedConvolution(config.hidden_size, kernel)
        self.mlp_conv = GroupedConvolution(config.hidden_size, kernel)

    def __call__(self, x: mx.array, context: LayerContext, masks: Masks, position: int) -> mx.array:
        given, kernel = self.attention_conv.prepare(self.input_layernorm(x))
        x = x + self.attention_conv.finish(self.self_attn(given, context, masks, position), kernel)
        given, kernel = self.mlp_conv.prepare(self.post_attention_layernorm(x))
        return x + self.mlp_conv.finish(self.mlp(given), kernel)
