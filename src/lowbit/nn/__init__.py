"""lowbit.nn: torch's layers, with quantizers on their way."""

from lowbit.nn.attention import QuantMultiheadAttention
from lowbit.nn.layers import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
    QuantEmbedding,
    QuantEmbeddingBag,
    QuantLinear,
)
from lowbit.nn.quantizers import Binarize, DoReFaActivation, DoReFaWeight
from lowbit.nn.recurrent import QuantGRU, QuantGRUCell, QuantLSTM, QuantLSTMCell, QuantRNN, QuantRNNCell

__all__ = [
    "Binarize",
    "DoReFaActivation",
    "DoReFaWeight",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantEmbedding",
    "QuantEmbeddingBag",
    "QuantGRU",
    "QuantGRUCell",
    "QuantLSTM",
    "QuantLSTMCell",
    "QuantLinear",
    "QuantMultiheadAttention",
    "QuantRNN",
    "QuantRNNCell",
]
