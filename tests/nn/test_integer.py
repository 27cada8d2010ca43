"""Products of integers: sums that are exact, and then the order of float operations that the docstring gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit
from compare import assert_same_bits
from converting import call_output, prepared, products, run, watch
from lowbit import EMA, Learned, PerBatch, PerBlock, PerChannel, PerGroup, PerToken, QuantSpec, Recipe, graph
from lowbit.nn import integer
from nn.layers import LAYERS, batch_of, in_dtype

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CODES = {torch.int8: (-128, 128), torch.uint8: (0, 256)}

ACTIVATIONS: dict[str, QuantSpec] = {
    "affine": QuantSpec(bits=8, symmetric=False, scale_mode=EMA()),
    "symmetric": QuantSpec(bits=8, scale_mode=EMA()),
    "unsigned": QuantSpec(bits=4, signed=False, scale_mode=EMA()),
    "learned": QuantSpec(bits=3, symmetric=False, scale_mode=Learned("lsq+")),
    "token": QuantSpec(bits=8, per=PerToken(), scale_mode=PerBatch()),
    "tensor": QuantSpec(bits=7, symmetric=False, scale_mode=PerBatch()),
    "dorefa": QuantSpec(bits=3, method="dorefa_activation"),
}
WEIGHTS: dict[str, QuantSpec] = {
    "channels": QuantSpec(bits=8, per=PerChannel(0), narrow=True),
    "tensor": QuantSpec(bits=8),
    "two bits": QuantSpec(bits=2, scale_mode=Learned()),
    "groups": QuantSpec(bits=4, per=PerGroup(4)),
    "rows": QuantSpec(bits=8, per=PerToken()),
    "binary": QuantSpec(bits=1, per=PerChannel(0), method="binary"),
    "dorefa": QuantSpec(bits=7, method="dorefa_weight"),
    "unsigned": QuantSpec(bits=8, signed=False),
}
MULTIPLIES = (
    *("linear", "linear without bias", "transformers conv1d", "conv1d", "conv2d", "conv3d", "same", "valid", "reflect"),
    *("replicate", "circular", "grouped", "depthwise"),
)
POOLS = ("avg pool1d", "avg pool2d", "avg pool3d", "adaptive pool1d", "adaptive pool2d", "adaptive pool3d")


def assert_written_out(model: Any, batch: Any, *, how: str = "integer") -> nn.Module:
    """The converted model's one layer multiplies codes, and gives what is written out."""
    converted = lowbit.convert(model)
    assert products(converted) == {"": how}
    calls = watch(converted)
    (output,) = run(converted, batch)
    ((*call, result),) = calls[""]
    assert_same_bits(output, result)
    assert_same_bits(result, call_output(model, *call).detach())
    return converted


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", MULTIPLIES)
def test_weights(name: str, weight: str) -> None:
    batch = batch_of(name)
    assert_written_out(prepared(LAYERS[name](), Recipe(WEIGHTS[weight], ACTIVATIONS["affine"]), batch), batch)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weight", ["channels", "groups"])
@pytest.mark.parametrize("name", ["linear", "transformers conv1d", "conv2d", "circular", "depthwise"])
def test_activations(name: str, weight: str, activation: str) -> None:
    batch = batch_of(name)
    assert_written_out(prepared(LAYERS[name](), Recipe(WEIGHTS[weight], ACTIVATIONS[activation]), batch), batch)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str, activation: str) -> None:
    batch = batch_of(name)
    assert_written_out(prepared(LAYERS[name](), Recipe(None, ACTIVATIONS[activation]), batch), batch)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("weight", ["channels", "two bits", "groups", "binary"])
@pytest.mark.parametrize("name", ["linear", "conv2d", "grouped"])
def test_dtypes(name: str, weight: str, dtype: torch.dtype) -> None:
    for activation in ("affine", "token", "learned", "dorefa"):
        layer, batch = in_dtype((LAYERS[name](), batch_of(name)), dtype)
        assert_written_out(prepared(layer, Recipe(WEIGHTS[weight], ACTIVATIONS[activation]), batch), batch)


@pytest.mark.parametrize("name", ["linear", "conv1d", "avg pool2d"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_sums_beyond_their_digits(name: str, dtype: torch.dtype) -> None:
    """Where float32 has no digit left for the sum's last one."""
    layer, batch = in_dtype((LAYERS[name](), 100 * batch_of(name)), dtype)
    if isinstance(layer, nn.Linear):
        layer, batch = nn.Linear(30000, 3, dtype=dtype), torch.rand(2, 30000).to(dtype)
        nn.init.uniform_(layer.weight, 0.5, 1.0)
    assert_written_out(prepared(layer, Recipe(WEIGHTS["channels"], ACTIVATIONS["affine"]), batch), batch)


@pytest.mark.parametrize("per", [PerBlock(2, 4), PerBlock(4, 2), PerGroup(2), PerGroup(8)], ids=str)
@pytest.mark.parametrize("name", ["linear", "transformers conv1d", "conv2d", "conv1d", "grouped"])
def test_scales_inside_of_rows(name: str, per: Any) -> None:
    batch = batch_of(name)
    model = prepared(LAYERS[name](), Recipe(QuantSpec(bits=4, per=per), ACTIVATIONS["affine"]), batch)
    assert_written_out(model, batch)


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 6, 7])
def test_groups_are_added_in_halves(groups: int) -> None:
    x = torch.randn(4, 4 * groups)
    model = prepared(nn.Linear(4 * groups, 3), Recipe(WEIGHTS["groups"], ACTIVATIONS["token"]), x)
    assert_written_out(model, x)


@pytest.mark.parametrize("per", [lowbit.PerTensor(), PerChannel(0)], ids=str)
@pytest.mark.parametrize("bits", [1, 5, 8])
def test_affine_weights(bits: int, per: Any) -> None:
    for name in ("linear", "transformers conv1d"):
        batch = batch_of(name)
        spec = QuantSpec(bits=bits, per=per, symmetric=False)
        for activation in ("affine", "symmetric", "token"):
            model = prepared(LAYERS[name](), Recipe(spec, ACTIVATIONS[activation]), batch)
            assert_written_out(model, batch)


@pytest.mark.parametrize("name", ["linear", "conv2d", "depthwise"])
def test_biases_of_integers(name: str) -> None:
    batch = batch_of(name)
    model = prepared(LAYERS[name](), Recipe(WEIGHTS["channels"], ACTIVATIONS["affine"], bias=True), batch)
    converted = assert_written_out(model, batch)
    assert converted.state_dict()["bias_codes"].any()


def test_samples_apart() -> None:
    """One scale for each sample, as PerToken is for images; or for each row of the first axis."""
    for name in ("conv1d", "conv3d", "reflect", "grouped", "avg pool2d"):
        batch = batch_of(name) * torch.tensor([1.0, 9.0]).view(2, *[1] * (batch_of(name).dim() - 1))
        model = prepared(LAYERS[name](), Recipe(WEIGHTS["channels"], ACTIVATIONS["token"]), batch)
        assert model.input_quantizer.per == PerChannel(0)
        assert_written_out(model, batch)
    x = torch.randn(3, 5, 8)
    for symmetric in (True, False):
        spec = QuantSpec(bits=8, per=PerChannel(0), scale_mode=PerBatch(), symmetric=symmetric)
        for weight in ("channels", "groups"):
            assert_written_out(prepared(nn.Linear(8, 3), Recipe(WEIGHTS[weight], spec), x), x)
    channels = QuantSpec(bits=8, per=PerChannel(1), scale_mode=EMA())
    assert_written_out(prepared(nn.AvgPool1d(2), Recipe(None, channels), x), x)


REASONS: dict[str, tuple[nn.Module, Recipe, tuple[int, ...], str]] = {
    "no input": (nn.Linear(8, 4), Recipe(8), (2, 8), "its input is not quantized"),
    "no weight": (nn.Linear(8, 4), Recipe(None, 8), (2, 8), "its weight is not quantized"),
    "wide input": (nn.Linear(8, 4), Recipe(8, 9), (2, 8), "its input has 9 bits, and the product takes 8"),
    "wide weight": (nn.Linear(8, 4), Recipe(9, 8), (2, 8), "its weight has 9 bits, and the product takes 8"),
    "wide odd weight": (
        nn.Linear(8, 4),
        Recipe(QuantSpec(bits=8, method="dorefa_weight"), 8),
        (2, 8),
        "its weight has 8 bits, and the product takes 8",
    ),
    "input scales along the sum": (
        nn.Linear(8, 4),
        Recipe(8, QuantSpec(bits=8, per=PerGroup(4), scale_mode=PerBatch())),
        (2, 8),
        "its input has scales PerGroup(size=4), which change along the sum",
    ),
    "channels of a convolution": (
        nn.Conv1d(8, 4, 1),
        Recipe(8, QuantSpec(bits=8, per=PerChannel(1), scale_mode=EMA())),
        (2, 8, 4),
        "its input has scales PerChannel(axis=1), which change along the sum",
    ),
    "zero points of samples": (
        nn.Conv1d(8, 4, 1),
        Recipe(8, QuantSpec(bits=8, per=PerToken(), symmetric=False, scale_mode=PerBatch())),
        (2, 8, 4),
        "its input has zero points PerChannel(axis=0), and a padding of one code",
    ),
    "zero points of a kernel": (
        nn.Conv1d(8, 4, 1),
        Recipe(QuantSpec(bits=8, symmetric=False), 8),
        (2, 8, 4),
        "its weight has zero points",
    ),
    "zero points of groups": (
        nn.Linear(8, 4),
        Recipe(QuantSpec(bits=8, symmetric=False, per=PerGroup(4)), 8),
        (2, 8),
        "its weight has zero points",
    ),
    "zero points with a sign": (
        nn.Linear(8, 4),
        Recipe(QuantSpec(bits=8, symmetric=False, signed=True), 8),
        (2, 8),
        "its weight has zero points",
    ),
    "binary input": (
        nn.Linear(8, 4),
        Recipe(8, QuantSpec(bits=1, method="binary")),
        (2, 8),
        "its input is quantized by Binarize, which has no codes",
    ),
    "a transposed convolution": (nn.ConvTranspose1d(8, 4, 1), Recipe(8, 8), (2, 8, 4), "it has no product of integers"),
    "attention": (nn.MultiheadAttention(8, 2), Recipe(8, 8), (2, 1, 8), "it has no product of integers"),
    "ragged windows": (nn.AvgPool1d(2, ceil_mode=True), Recipe(8, 8), (2, 8, 3), "its windows differ in size"),
    "too long a sum": (nn.Linear(70000, 1), Recipe(8, 8), (1, 70000), "a sum of 70,000 products may not fit 32 bits"),
    "too long for a bias": (
        nn.Linear(40000, 1),
        Recipe(8, 8, bias=True),
        (1, 40000),
        "a sum of 40,000 products may not fit 32 bits",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name: str) -> None:
    layer, recipe, shape, reason = REASONS[name]
    x: Any = torch.randn(shape)
    x = (x, x, x) if name == "attention" else x
    model = prepared(layer, recipe, x)
    converted = lowbit.convert(model)
    assert products(converted)[""] == f"float: {reason}"
    for output, wanted in zip(run(converted, x), run(model, x), strict=True):
        if name == "attention":
            torch.testing.assert_close(output, wanted)
        else:
            assert_same_bits(output, wanted)


def test_windows_that_differ_run_in_float() -> None:
    for name in ("ragged pool", "ceiling pool", "adaptive pool2d"):
        x = batch_of(name)
        layer = nn.AdaptiveAvgPool2d((4, 5)) if name == "adaptive pool2d" else LAYERS[name]()
        model = prepared(layer, Recipe(None, 8), x)
        assert_same_bits(run(lowbit.convert(model), x)[0], run(model, x)[0])


def test_a_class_below_torchs() -> None:
    class Whole(nn.AdaptiveAvgPool2d):
        """Its name says nothing of its axes."""

    class Mine(nn.Conv2d):
        pass

    x = torch.randn(2, 4, 6, 6)
    assert_written_out(prepared(Whole(1), Recipe(8, 8), x), x)
    assert_written_out(prepared(Mine(4, 3, 3), Recipe(8, 8), x), x)


@pytest.mark.parametrize("activation", ["affine", "token"])
@pytest.mark.parametrize("batch", [1, 7])
def test_axes_of_one(batch: int, activation: str) -> None:
    for layer, shape in (
        (nn.Linear(1, 5), (1,)),
        (nn.Linear(5, 1), (5,)),
        (nn.Conv1d(1, 3, 1), (1, 6)),
        (nn.Conv2d(3, 1, 1), (3, 2, 1)),
        (nn.Conv2d(1, 1, 3), (1, 3, 3)),
    ):
        x = torch.randn(batch, *shape)
        assert_written_out(prepared(layer, Recipe(WEIGHTS["channels"], ACTIVATIONS[activation]), x), x)


def test_a_sum_of_extremes() -> None:
    """As long as the sums may get, with every term at the end of its range: no step of it overflows."""
    layer, x = nn.Linear(60000, 2, bias=False), torch.full((2, 60000), 1.0)
    with torch.no_grad():
        layer.weight[0], layer.weight[1] = 1.0, -1.0
        x[1] = -1.0
    for activation in (ACTIVATIONS["affine"], QuantSpec(bits=8, symmetric=False, scale_mode=EMA(), signed=True)):
        model = prepared(layer, Recipe(WEIGHTS["channels"], activation), x)
        assert_written_out(model, x)


sizes = st.integers(0, 9)


def draw(shape: tuple[int, ...], dtype: torch.dtype, extreme: bool) -> Tensor:
    """Codes of the whole range, or of its ends."""
    low, high = CODES[dtype]
    codes = torch.randint(low, high, shape)
    return torch.where(codes % 2 == 0, low, high - 1).to(dtype) if extreme else codes.to(dtype)


def zero_point_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    if kind == "none":
        return None
    return torch.randint(*CODES[dtype], () if kind == "one" else shape).int()


class TestOps:
    @given(
        batch=st.lists(sizes, max_size=2),
        inner=st.integers(1, 40),
        columns=sizes,
        dtypes=st.tuples(*[st.sampled_from(list(CODES))] * 2),
        zero_points=st.tuples(st.sampled_from(["none", "one", "rows"]), st.sampled_from(["none", "one", "columns"])),
        extreme=st.booleans(),
    )
    def test_matmul(
        self, batch: list[int], inner: int, columns: int, dtypes: Any, zero_points: Any, extreme: bool
    ) -> None:
        q, w = draw((*batch, inner), dtypes[0], extreme), draw((inner, columns), dtypes[1], extreme)
        z = zero_point_of(zero_points[0], (*batch, 1), dtypes[0])
        z_w = zero_point_of(zero_points[1], (columns,), dtypes[1])
        x, v = (codes.long() - (0 if zero is None else zero.long()) for codes, zero in ((q, z), (w, z_w)))
        total = graph.integer_matmul(q, z, w, z_w)
        assert total.dtype == torch.int32
        assert torch.equal(total.long(), x @ v)

    @given(
        groups=st.integers(1, 5),
        rows=sizes,
        inner=st.integers(1, 9),
        columns=sizes,
        dtypes=st.tuples(*[st.sampled_from(list(CODES))] * 2),
        zero_point=st.sampled_from(["none", "one", "rows"]),
    )
    def test_matmul_by_groups(
        self, groups: int, rows: int, inner: int, columns: int, dtypes: Any, zero_point: str
    ) -> None:
        q, w = draw((groups, rows, inner), dtypes[0], True), draw((groups, inner, columns), dtypes[1], True)
        z = zero_point_of(zero_point, (rows, 1), dtypes[0])
        wanted = (q.long() - (0 if z is None else z.long())) @ w.long()
        assert torch.equal(graph.integer_matmul_by_groups(q, z, w).long(), wanted)

    @given(
        dims=st.integers(1, 3),
        batch=st.integers(0, 2),
        groups=st.integers(1, 2),
        channels=st.integers(1, 3),
        outputs=st.integers(1, 3),
        steps=st.lists(st.tuples(*[st.integers(1, 3)] * 3), min_size=3, max_size=3),
        padding=st.lists(st.integers(0, 3), min_size=6, max_size=6),
        dtypes=st.tuples(*[st.sampled_from(list(CODES))] * 2),
        zero_point=st.sampled_from(["none", "one"]),
    )
    def test_conv(
        self,
        dims: int,
        batch: int,
        groups: int,
        channels: int,
        outputs: int,
        steps: Any,
        padding: list[int],
        dtypes: Any,
        zero_point: str,
    ) -> None:
        kernel, stride, dilation = (list(sizes) for sizes in zip(*steps[:dims], strict=True))
        q = draw((batch, groups * channels, *[7] * dims), dtypes[0], True)
        w = draw((groups * outputs, channels, *kernel), dtypes[1], True)
        z, around = zero_point_of(zero_point, (), dtypes[0]), padding[: 2 * dims]
        x = F.pad(q.double() - (0 if z is None else z.double()), around)
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        wanted = convolve(x, w.double(), None, stride, 0, dilation, groups)
        total = graph.integer_conv(q, z, w, stride, around, dilation, groups)
        assert total.dtype == torch.int32
        assert torch.equal(total.long(), wanted.long())

    def test_are_known_to_torch(self) -> None:
        """Schemas, and the shapes and dtypes of results without data, for torch.compile and torch.export."""
        q, w = draw((2, 3, 4), torch.uint8, False), draw((4, 5), torch.int8, False)
        z, s = torch.tensor(3, dtype=torch.int32), torch.tensor(0.1)
        x, image = torch.randn(2, 3, 4), draw((2, 4, 6, 5), torch.uint8, False)
        kernel = draw((6, 2, 3, 2), torch.int8, False)
        quantizer = (x, s, z, 0, 255, None, 0, True, "here")
        for op, args in (
            (graph.fake_quantize, quantizer),
            (graph.fake_quantize, (x, torch.rand(3) + 0.1, None, -8, 7, 1, 0, False, "")),
            (graph.quantize, quantizer),
            (graph.quantize, (x.transpose(0, 1), torch.rand(3, 2, 2) + 0.1, None, -2048, 2047, 2, 2, False, "")),
            (graph.dequantize, (q, s, z, None, 0, torch.bfloat16)),
            (graph.integer_matmul, (q, z, w, None)),
            (graph.integer_matmul_by_groups, (q, None, draw((2, 4, 5), torch.int8, False))),
            (graph.integer_conv, (image, z, kernel, [2, 1], [1, 0, 2, 1], [1, 2], 2)),
            (graph.integer_conv, (image, None, draw((6, 4, 3, 2), torch.int8, False), [1, 1], [0] * 4, [1, 1], 1)),
        ):
            torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))

    def test_grids_by_their_ends(self) -> None:
        grids = [lowbit.Grid(bits, narrow=narrow) for bits in range(2, 17) for narrow in (False, True)]
        grids += [lowbit.Grid(bits, signed=False) for bits in range(1, 17)]
        for grid in grids:
            assert graph._grid(grid.quant_min, grid.quant_max) == grid


def test_what_has_no_product_says_so() -> None:
    assert integer.choose(nn.Linear(2, 2)) == (None, "it has no product of integers")
