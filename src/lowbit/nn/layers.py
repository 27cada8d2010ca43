"""The layers with one weight: Linear, convolutions, embeddings; and pooling, which has none."""

from __future__ import annotations

from torch import nn

from lowbit.nn.convolution import ConvolutionLayer
from lowbit.nn.layer import QuantLayer
from lowbit.nn.linear import LinearLayer


class TransposedLayer(QuantLayer):
    """A layer whose weight holds the outputs on axis 1."""

    output_axis = 1


class LookUpLayer(QuantLayer):
    """A layer that takes indices: only its weight is quantized, one row for each index."""

    takes_activations = False


class WeightlessLayer(QuantLayer):
    """A layer that only sums its input: the input is quantized."""

    has_weight = False


class QuantLinear(LinearLayer, nn.Linear):
    """y = q_in(x) @ q_w(w)^T + b"""


class QuantConv1d(ConvolutionLayer, nn.Conv1d):
    """y = conv1d(q_in(x), q_w(w)) + b"""


class QuantConv2d(ConvolutionLayer, nn.Conv2d):
    """y = conv2d(q_in(x), q_w(w)) + b"""


class QuantConv3d(ConvolutionLayer, nn.Conv3d):
    """y = conv3d(q_in(x), q_w(w)) + b"""


class QuantConvTranspose1d(TransposedLayer, nn.ConvTranspose1d):
    """y = conv_transpose1d(q_in(x), q_w(w)) + b"""


class QuantConvTranspose2d(TransposedLayer, nn.ConvTranspose2d):
    """y = conv_transpose2d(q_in(x), q_w(w)) + b"""


class QuantConvTranspose3d(TransposedLayer, nn.ConvTranspose3d):
    """y = conv_transpose3d(q_in(x), q_w(w)) + b"""


class QuantEmbedding(LookUpLayer, nn.Embedding):
    """y = q_w(w)[index]"""


class QuantEmbeddingBag(LookUpLayer, nn.EmbeddingBag):
    """y = the sum, mean or maximum of q_w(w)[indices]"""
