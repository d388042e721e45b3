"""Hooks around the gradients and the update: what they receive, and what they may change."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
from torch.nn import functional as F

from polyxla import UsageError
from polyxla_training import Trainer

pytestmark = pytest.mark.usefixtures("fake_replicas")


def _trainer(devices: int = 1, **options: Any) -> Trainer:
    return Trainer(**{"runtime": "fake", "devices": devices, "log_dir": None, "progress": False, **options})


def _data(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, 3, generator=generator)
    return [(x, x @ torch.tensor([[1.0], [-2.0], [0.5]])) for x in inputs]


class _Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any) -> Any:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trained(module: _Net, count: int = 8, **options: Any) -> torch.Tensor:
    _trainer(**options).fit(module, _data(count))
    return module.layer.weight.detach()


class _Warms(_Net):
    """Lightning's own example of an optimizer_step."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        assert isinstance(optimizer, torch.optim.SGD)
        self.seen.append((epoch, batch_idx, self.trainer.global_step))
        loss = optimizer.step(closure=optimizer_closure)
        assert loss.item() > 0
        assert not loss.requires_grad


@pytest.mark.parametrize("accumulate", [1, 3], ids=["each-batch", "3-batches"])
def test_optimizer_step_makes_the_same_update(accumulate: int) -> None:
    module = _Warms()
    assert torch.equal(_trained(module, accumulate=accumulate), _trained(_Net(), accumulate=accumulate))
    # With 8 batches and 3 to an update, the last two batches make an update at the end of the epoch.
    steps = [2, 5, 7] if accumulate == 3 else list(range(8))
    assert module.seen == [(0, batch, step) for step, batch in enumerate(steps)]
    assert "step" not in vars(module)


def test_optimizer_step_may_leave_updates_out() -> None:
    class EverySecond(_Net):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            if batch_idx % 2:
                optimizer.step(optimizer_closure)
            else:
                optimizer_closure()

    trainer, module, expected = _trainer(), EverySecond(), _Net()
    trainer.fit(module, _data(8))
    _trainer().fit(expected, _data(8)[1::2])
    assert torch.equal(module.layer.weight, expected.layer.weight)
    assert trainer.outcome is not None
    assert trainer.outcome.steps == 4


def test_the_closure_may_be_called_before_the_step() -> None:
    class Calls(_Net):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            optimizer_closure()
            optimizer.step()

    assert torch.equal(_trained(Calls()), _trained(_Net()))


@pytest.mark.parametrize("steps", [True, False])
def test_an_optimizer_step_without_its_closure_is_refused(steps: bool) -> None:
    class Forgets(_Net):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            if steps:
                optimizer.step()

    with pytest.raises(UsageError) as caught:
        _trainer().fit(Forgets(), _data(1))
    assert caught.value.what == (
        "optimizer_step did not call its closure, which runs training_step and the backward pass"
    )
    assert caught.value.fix == "Write optimizer.step(closure=optimizer_closure)."


def test_schedules_advance_once_an_update() -> None:
    class Scheduled(_Warms):
        def configure_optimizers(self) -> Any:
            self.optimizer = super().configure_optimizers()
            halving = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
            return [self.optimizer], [{"scheduler": halving, "interval": "step"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            assert metric is None
            scheduler.step()

    module = Scheduled()
    _trained(module, count=3)
    assert module.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)


class _Gradients(_Net):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(self.layer.weight.grad.clone())  # type: ignore[union-attr]
        gradients.append(self.seen[-1])


gradients: list[torch.Tensor] = []


def test_hooks_before_the_step_see_the_mean_gradient_of_all_replicas() -> None:
    gradients.clear()
    _trainer(4).fit(_Gradients(), _data(4))
    assert len(gradients) == 4
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    net, batches = _Net(), _data(4)
    sum(net.training_step(batch) / 4 for batch in batches).backward()
    assert torch.allclose(gradients[0], net.layer.weight.grad, atol=1e-6)  # type: ignore[arg-type]


class _Clips(_Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.seen.append((gradient_clip_val, gradient_clip_algorithm))
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({}, (None, None)),
        ({"clip_norm": 0.1}, (0.1, "norm")),
        ({"clip_value": 0.01}, (0.01, "value")),
    ],
    ids=["none", "norm", "value"],
)
def test_gradient_clipping_receives_the_trainers_limit(options: Any, passed: Any) -> None:
    module = _Clips()
    assert torch.equal(_trained(module, **options), _trained(_Net(), **options))
    assert module.seen == [passed] * 8


def test_a_clipping_hook_replaces_the_trainers_clipping() -> None:
    class Ignores(_Net):
        def configure_gradient_clipping(self, *_: Any, **limits: Any) -> None: ...

    assert torch.equal(_trained(Ignores(), clip_norm=0.01), _trained(_Net()))


def test_two_limits_for_one_clipping_hook_are_refused() -> None:
    with pytest.raises(UsageError, match="clip_norm and clip_value are both set"):
        _trainer(clip_norm=1.0, clip_value=1.0).fit(_Clips(), _data(1))


def test_the_hook_of_the_backward_pass_replaces_it() -> None:
    class Doubles(_Net):
        def backward(self, loss: torch.Tensor) -> None:
            (2 * loss).backward()

    class Faster(_Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.2)

    assert torch.allclose(_trained(Doubles()), _trained(Faster()))


def test_the_batchs_last_hook_receives_what_the_step_returned() -> None:
    class Returns(_Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return {"loss": super().training_step(batch), "index": batch_idx}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append((outputs["index"], outputs["loss"].requires_grad))

    module = Returns()
    _trained(module, count=3)
    assert module.seen == [(0, False), (1, False), (2, False)]


def test_should_stop_of_one_replica_ends_all_after_the_epoch() -> None:
    class Stops(_Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_rank == 2 and self.global_step == 1:
                self.trainer.should_stop = True

    trainer = _trainer(4, max_epochs=5)
    trainer.fit(Stops(), _data(12))
    assert trainer.outcome is not None
    assert (trainer.outcome.steps, trainer.outcome.epochs, trainer.outcome.stopped) == (3, 1, "")


def test_should_stop_before_the_first_epoch_lets_several_replicas_train_it() -> None:
    class Stops(_Net):
        def on_train_start(self) -> None:
            self.trainer.should_stop = self.global_rank == 1

    trainer = _trainer(2, max_epochs=5)
    trainer.fit(Stops(), _data(2))
    assert trainer.outcome is not None
    assert trainer.outcome.epochs == 1


def test_frozen_parts_of_a_lightning_module_stay_in_eval_mode(capsys: pytest.CaptureFixture[str]) -> None:
    class Frozen(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3).eval()

        def training_step(self, batch: Any) -> Any:
            self.seen.append((self.norm.training, self.training))
            return super().training_step((self.norm(batch[0]), batch[1]))

        def validation_step(self, batch: Any) -> None:
            self.seen.append((self.norm.training, self.training))

    module = Frozen()
    _trainer(max_epochs=2).fit(module, _data(1), _data(1))
    assert module.seen == [(False, True), (False, False)] * 2
    assert (module.norm.training, module.training) == (False, True)
    assert capsys.readouterr().err == (
        "polyxla: modules that stay in eval mode: 1; call train() on those to be trained\n"
    )


def test_what_the_trainer_view_lacks_is_named() -> None:
    class Asks(_Net):
        def on_train_start(self) -> None:
            assert not hasattr(self.trainer, "strategy")
            self.trainer.checkpoint_callback  # noqa: B018

    with pytest.raises(
        AttributeError, match=r"no 'checkpoint_callback' in self\.trainer; it has current_epoch,"
    ):
        _trainer().fit(Asks(), _data(1))


def test_a_module_gathers_from_all_replicas() -> None:
    shapes: list[Any] = []

    class Gathers(_Net):
        def on_train_start(self) -> None:
            gathered: Any = self.all_gather({"a": torch.ones(2)})
            shapes.append(gathered["a"].shape)

    _trainer(4).fit(Gathers(), _data(4))
    _trainer(1).fit(Gathers(), _data(4))
    assert shapes == [(4, 2)] * 4 + [(2,)]


def test_a_module_changes_what_is_saved_and_what_is_loaded(tmp_path: Any) -> None:
    class Remembers(_Net):
        note: Any = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["global_step"] == self.trainer.global_step
            checkpoint["note"] = {"words": ["a", "b"], "epoch": checkpoint["epoch"]}
            checkpoint["state_dict"]["layer.bias"] = torch.full((1,), 7.0)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.note = checkpoint["note"]
            checkpoint["state_dict"]["layer.weight"] = torch.full((1, 3), 5.0)

        def on_train_start(self) -> None:
            self.seen.append((self.layer.bias.item(), self.layer.weight.tolist()))

    options: Any = {"checkpoint_dir": str(tmp_path), "resume": "auto"}
    _trainer(**options).fit(Remembers(), _data(2))
    module = Remembers()
    _trainer(max_epochs=2, **options).fit(module, _data(2))
    assert module.note == {"words": ["a", "b"], "epoch": 1}
    assert module.seen == [(7.0, [[5.0, 5.0, 5.0]])]


def test_a_lenient_module_saves_only_a_part(tmp_path: Any) -> None:
    class Lenient(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.strict_loading = False

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            del checkpoint["state_dict"]["layer.bias"]

    options: Any = {"checkpoint_dir": str(tmp_path), "resume": "auto"}
    _trainer(**options).fit(Lenient(), _data(2))
    trainer = _trainer(max_epochs=2, **options)
    trainer.fit(Lenient(), _data(2))
    assert trainer.outcome is not None
    assert trainer.outcome.steps == 4


def test_a_lightning_module_within_a_module_sees_the_trainer_too() -> None:
    class Inner(lightning.LightningModule):
        def forward(self, inputs: torch.Tensor) -> Any:
            return inputs * (1 + self.current_epoch)

    class Outer(_Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def training_step(self, batch: Any) -> Any:
            self.seen.append(self.inner(torch.ones(1)).item())
            return super().training_step(batch)

    module = Outer()
    _trainer(max_epochs=2).fit(module, _data(1))
    assert module.seen == [1.0, 2.0]
    assert module.inner._trainer is None
