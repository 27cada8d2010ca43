"""Checkpoints, training as people train, and the way back to float."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit
from compare import assert_same_bits
from lowbit import (
    Learned,
    PerTensor,
    QuantSpec,
    Recipe,
    Rule,
    SteKind,
    prepare,
    recipes,
)
from lowbit.bench.networks import Transformer
from models.small import (
    Joined,
    Projections,
    Residual,
    activations,
    all_state,
    assert_same_states,
    folded_pair,
    images,
    mlp,
)


class TestCheckpoints:
    @pytest.mark.parametrize(
        "recipe", [recipes.w8a8(), recipes.w2a2(), recipes.dorefa()], ids=["w8a8", "w2a2", "dorefa"]
    )
    def test_a_float_checkpoint_loads(self, recipe: Recipe) -> None:
        model = prepare(mlp(8, 8, 8), recipe, torch.randn(2, 8))
        model(torch.randn(4, 8))
        other = mlp(8, 8, 8)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(7)
        before = all_state(model)
        float_state = other.state_dict()
        keys = list(float_state)
        model.load_state_dict(float_state)
        assert list(float_state) == keys
        assert_same_bits(model[0].weight, other[0].weight)
        for key, value in before.items():
            if "input_quantizer" in key:
                assert_same_bits(model.state_dict()[key], value)
        if recipe == recipes.w2a2():
            fresh = prepare(other, recipe)
            assert_same_bits(model[0].weight_quantizer.scale, fresh[0].weight_quantizer.scale)
            assert not torch.equal(model[0].weight_quantizer.scale, before["0.weight_quantizer.scale"])

    def test_a_float_checkpoint_of_a_folded_pair_starts_from_the_folded_weight(self) -> None:
        other = folded_pair()
        model = prepare(folded_pair(), recipes.w2a2(), images())
        model.load_state_dict(other.state_dict())
        fresh = prepare(other, recipes.w2a2(), images())
        assert_same_bits(model[0].weight_quantizer.scale, fresh[0].weight_quantizer.scale)

    def test_strict_still_finds_what_is_missing(self) -> None:
        model = prepare(mlp(8, 8, 8), recipes.w8a8(), torch.randn(2, 8))
        state = mlp(8, 8, 8).state_dict()
        del state["0.weight"]
        with pytest.raises(RuntimeError, match=r"0\.weight"):
            model.load_state_dict(state)

    def test_one_of_another_recipe_names_the_layers(self) -> None:
        model = prepare(mlp(8, 8, 8), recipes.w8a8(), torch.randn(2, 8))
        rules = [Rule("2")]
        other = prepare(mlp(8, 8, 8), Recipe(weight=8, activation=8, rules=rules), torch.randn(2, 8))
        with pytest.raises(ValueError, match=r"not in the checkpoint: 2\.input_quantizer, 2\.weight_quantizer"):
            model.load_state_dict(other.state_dict())
        with pytest.raises(ValueError, match=r"quantized in the checkpoint, but not here: 2\.input_quantizer"):
            other.load_state_dict(model.state_dict())

    def test_after_restore_loading_is_torchs_own(self) -> None:
        model = lowbit.restore(prepare(mlp(8, 8), recipes.w8a8(), torch.randn(2, 8)))
        assert not model._load_state_dict_pre_hooks
        assert not model._load_state_dict_post_hooks
        assert set(model.__dict__) == set(mlp(8, 8).__dict__)
        model.load_state_dict(mlp(8, 8).state_dict())

    def test_a_copy_guards_itself(self) -> None:
        model = prepare(mlp(8, 8), recipes.w2a2(), torch.randn(2, 8))
        other = copy.deepcopy(model)
        state = {key: 3 * value for key, value in mlp(8, 8).state_dict().items()}
        untouched = all_state(model)
        other.load_state_dict(state)
        assert_same_states(all_state(model), untouched)
        assert not torch.equal(other[0].weight_quantizer.scale, model[0].weight_quantizer.scale)


class TestTraining:
    def test_gradients_accumulate(self) -> None:
        model = prepare(Residual(), recipes.w2a2(), images(channels=4))
        x = images(channels=4)
        model(x)
        lowbit.freeze(model)
        parts = []
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            parts.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
        for _ in range(2):
            model(x).square().sum().backward()
        for parameter, first, second in zip(model.parameters(), *parts, strict=True):
            assert_same_bits(first, second)
            assert_same_bits(parameter.grad, first + second)

    @pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
    def test_checkpointing_a_part_of_what_takes_a_tensor(self, reentrant: bool) -> None:
        """One consumer of x is inside, one outside; the part that runs again is no module of ops."""

        class Part(nn.Module):
            def __init__(self, use: bool) -> None:
                super().__init__()
                self.stem, self.outside, self.use = nn.Linear(8, 8), nn.Linear(8, 8), use
                self.inside = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Projections())

            def forward(self, x: Tensor) -> Tensor:
                x = self.stem(x)
                y = self.outside(x)
                z = checkpoint(self.inside, x, use_reentrant=reentrant) if self.use else self.inside(x)
                return torch.tanh(y) * z

        plain = prepare(Part(use=False), recipes.w8a8(), torch.randn(4, 8))
        assert plain.outside.input_quantizer is plain.inside[0].input_quantizer
        saving = copy.deepcopy(plain)
        saving.use = True
        for _ in range(2):
            x = torch.randn(4, 8)
            for model in (plain, saving):
                model.zero_grad()
                model(x).square().sum().backward()
            assert_same_states(all_state(saving), all_state(plain))
            for wanted, got in zip(plain.parameters(), saving.parameters(), strict=True):
                torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
    def test_activation_checkpointing_takes_statistics_once(self, reentrant: bool) -> None:
        class Checkpointed(nn.Module):
            def __init__(self, use: bool) -> None:
                super().__init__()
                self.stem, self.use = nn.Conv2d(3, 4, 1), use
                self.blocks = nn.ModuleList([Residual(), Residual()])

            def forward(self, x: Tensor) -> Tensor:
                x = self.stem(x)
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=reentrant) if self.use else block(x)
                return x

        plain = prepare(Checkpointed(use=False), recipes.w8a8(), images())
        saving = copy.deepcopy(plain)
        saving.use = True
        for _ in range(2):
            x = images()
            for model in (plain, saving):
                model.zero_grad()
                model(x).square().sum().backward()
            assert_same_states(all_state(saving), all_state(plain))
            for wanted, got in zip(plain.parameters(), saving.parameters(), strict=True):
                assert_same_bits(got.grad, wanted.grad)

    def test_autocast(self) -> None:
        model = prepare(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Residual()), recipes.w8a8(), images()
        )
        with torch.autocast("cpu", torch.bfloat16):
            output = model(images())
        output.float().square().sum().backward()
        assert output.dtype == torch.bfloat16
        assert all(
            p.grad.dtype == torch.float32 and p.grad.isfinite().all() and p.grad.any()
            for p in model.parameters()
            if p.dim() > 1
        )
        assert all(quantizer.scale.dtype == torch.float32 for quantizer in activations(model).values())
        model.eval()
        exact = model(x := images())
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(x).float() - exact).abs().max() < 0.1 * exact.abs().max()

    def test_a_gradient_scaler(self) -> None:
        models = [prepare(mlp(8, 8, 4), recipes.w2a2(), torch.randn(2, 8))]
        models.append(copy.deepcopy(models[0]))
        x = torch.randn(16, 8)
        for model, scaled in zip(models, (False, True), strict=True):
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
            for _ in range(3):
                sgd.zero_grad()
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(sgd)
                scaler.update()
        for wanted, got in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)

    def test_an_averaged_model(self) -> None:
        model = prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Residual()), recipes.w2a2(), images())
        model(images())
        averaged = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            averaged.update_parameters(model)
        wanted = model[0].weight_quantizer.scale * (1 / 1.1 + 1) / 2
        torch.testing.assert_close(averaged.module[0].weight_quantizer.scale, wanted, rtol=1e-5, atol=0)
        assert averaged.eval()(images()).isfinite().all()
        assert lowbit.summary(averaged).parameters > 0

    @pytest.mark.parametrize("recipe", ["w8a8", "w2a2"])
    def test_compiled_it_is_the_same(self, recipe: str) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stem, self.block, self.head = nn.Conv2d(3, 4, 3), Residual(), Joined()
                self.widen = nn.Conv2d(4, 3, 1)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.widen(self.block(F.relu(self.stem(x)))))

        torch._dynamo.reset()
        eager = prepare(Net(), recipes.presets()[recipe](), images())
        eager(images())
        traced = copy.deepcopy(eager)
        run = torch.compile(traced, fullgraph=True, backend="aot_eager")
        for training in (True, False):
            eager.train(training)
            traced.train(training)
            x = images(4)
            wanted, got = eager(x), run(x)
            assert_same_bits(got, wanted)
            for model, output in ((eager, wanted), (traced, got)):
                model.zero_grad()
                output.square().sum().backward()
            for a, b in zip(eager.parameters(), traced.parameters(), strict=True):
                torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)  # sums in another order
            assert_same_states(all_state(traced), all_state(eager))
        torch._dynamo.reset()

    def test_compiled_with_a_batch_norm_it_is_nearly_the_same(self) -> None:
        """The compiler's batch norm rounds in its own way, and some codes fall on the other side."""
        torch._dynamo.reset()
        model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Residual())
        eager = prepare(model, recipes.w8a8(), images())
        eager(images())
        traced = copy.deepcopy(eager)
        run = torch.compile(traced, fullgraph=True, backend="aot_eager")
        for training in (True, False):
            eager.train(training)
            traced.train(training)
            x = images(4)
            wanted, got = eager(x), run(x)
            assert (wanted - got).square().mean() < 1e-4 * wanted.square().mean()
        assert_same_bits(traced[1].num_batches_tracked, eager[1].num_batches_tracked)
        torch.testing.assert_close(traced[1].running_var, eager[1].running_var, rtol=1e-4, atol=1e-5)
        torch._dynamo.reset()

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
    @pytest.mark.parametrize("recipe", ["w8a8", "w8a8_dynamic"])
    def test_blocks_of_one_kind_share_what_is_compiled(self, recipe: str) -> None:
        torch._dynamo.reset()
        tokens = torch.randint(256, (2, 16))
        model = prepare(Transformer(3, 32, 2, 16), recipes.presets()[recipe](), tokens).train()
        model(tokens)
        twin, graphs = copy.deepcopy(model), []

        def count(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph

        for block in model.blocks:
            block.compile(backend=count, fullgraph=True)
        for _ in range(2):
            assert_same_bits(model(tokens), twin(tokens))
        assert len(graphs) == 1
        torch._dynamo.reset()

    def test_inference_mode_leaves_nothing_behind(self) -> None:
        model = prepare(Residual(), recipes.w8a8(), images(channels=4))
        model(images(channels=4))
        with torch.inference_mode():
            model(images(channels=4))
        model(images(channels=4)).sum().backward()

    def test_an_error_in_the_forward_leaves_it_usable(self) -> None:
        model = prepare(Residual(), recipes.w8a8(), images(channels=4))
        x = images(channels=4)
        copied = copy.deepcopy(model)
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3, 4, 4, 4, 4))
        model.load_state_dict(copied.state_dict())
        assert_same_bits(model(x), copied(x))
        assert not model.conv1._running


class TestRestore:
    def test_nothing_is_left(self) -> None:
        float_model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Residual(), nn.Flatten(2), nn.TransformerEncoderLayer(16, 2, 16)
        )
        model = prepare(float_model, recipes.w8a8(), images())
        model(images())
        lowbit.freeze(model)
        lowbit.restore(model)
        for (path, module), expected in zip(model.named_modules(), float_model.modules(), strict=True):
            assert type(module) is type(expected), path
            assert set(module.__dict__) == set(expected.__dict__), path

    def test_hooks_stay(self) -> None:
        model, seen = mlp(8, 8), []
        model[0].register_forward_hook(lambda *_: seen.append(1))
        prepared = prepare(model, recipes.w8a8_dynamic(), torch.randn(2, 8))
        seen.clear()
        prepared(torch.randn(2, 8))
        lowbit.restore(prepared)(torch.randn(2, 8))
        assert len(seen) == 2


def test_a_recipe_reaches_every_key_of_a_quantizer() -> None:
    spec = QuantSpec(
        bits=5, per=PerTensor(), symmetric=False, ste=SteKind.TANH, scale_mode=Learned("lsq+", batch_axis=0)
    )
    quantizer = prepare(nn.Linear(8, 4), Recipe(activation=spec), torch.randn(2, 8)).input_quantizer
    found = (quantizer.bits, quantizer.per, quantizer.symmetric, quantizer.ste, quantizer.scale_mode)
    assert found == (5, PerTensor(), False, SteKind.TANH, Learned("lsq+", batch_axis=0))
