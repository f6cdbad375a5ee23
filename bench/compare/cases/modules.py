"""Kinds of modules and of models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compare.case import Job, case, sgd
from tests.support.models import MLP, Contained, Recurrent, Residual, ResNet, loss_of


def _recurrent(job: Job, kind: type[nn.Module]) -> None:
    model, optimizer = job.prepare(Recurrent(kind), blocks=(kind,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case("`nn.LSTM`", test="test_recurrent_networks")
def lstm(job: Job) -> None:
    _recurrent(job, nn.LSTM)


@case("`nn.GRU`", test="test_recurrent_networks")
def gru(job: Job) -> None:
    _recurrent(job, nn.GRU)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.inp(x))


_ATTENTION = "test_multihead_attention_with_its_children_in_other_units"


def _attention(job: Job, *blocks: type[nn.Module]) -> None:
    model, optimizer = job.prepare(Attention(), blocks=blocks)
    for x in job.batches(3, 3, 5):
        job.train(model, optimizer, x)


@case("`nn.TransformerEncoderLayer`", test=_ATTENTION)
def attention(job: Job) -> None:
    _attention(job, nn.TransformerEncoderLayer)


@case(
    "`nn.TransformerEncoderLayer` with each linear layer a unit, inside `nn.MultiheadAttention` as well",
    test=_ATTENTION,
)
def attention_of_units(job: Job) -> None:
    _attention(job, nn.Linear)


def _with_weight_norm(width: int) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(width, width))


@case("`weight_norm`", test="test_parametrizations_of_weights")
def weight_norm(job: Job) -> None:
    model, optimizer = job.prepare(nn.Sequential(*(nn.Sequential(_with_weight_norm(5), nn.Tanh()) for _ in range(2))))
    for x in job.batches(3):
        job.train(model, optimizer, x)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@case("`spectral_norm`", test="test_parametrizations_of_weights")
def spectral_norm(job: Job) -> None:
    model, optimizer = job.prepare(nn.Sequential(Spectral(), Spectral()), blocks=(Spectral,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


class Symmetric(nn.Module):
    """Makes a symmetric matrix of the upper triangle of another one."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def _with_symmetric_weight(width: int) -> nn.Module:
    layer = nn.Linear(width, width)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@case("a parametrization of one's own, `register_parametrization`", test="test_parametrizations_of_weights")
def own_parametrization(job: Job) -> None:
    layers = (nn.Sequential(_with_symmetric_weight(5), nn.Tanh()) for _ in range(2))
    model, optimizer = job.prepare(nn.Sequential(*layers))
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case("convolutions in `channels_last`", test="test_conv_nets_in_channels_last_keep_their_strides")
def channels_last(job: Job) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 3),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    model, optimizer = job.prepare(model, blocks=(nn.Conv2d,))
    for x in job.batches(3, 3, 8, 8):
        job.train(model, optimizer, x.to(memory_format=torch.channels_last))


@case(
    "a ResNet with `nn.BatchNorm2d`, and its buffers",
    test="test_a_resnet_has_gradients_and_buffers_as_under_ddp",
    note="Both ranks see one batch, so that the statistics of a rank are those of the plain model.",
)
def resnet(job: Job) -> None:
    model, optimizer = job.prepare(ResNet(), blocks=(Residual,))
    for x in job.batches(3, 3, 8, 8, shared=True):
        job.train(model, optimizer, x)
    job.see("buffers", [buffer.clone() for buffer in model.buffers()])
    model.eval()
    with torch.no_grad():
        job.see("evaluation", model(job.batch(9, 3, 8, 8, shared=True)))


@case(
    "`nn.SyncBatchNorm` with its statistics as they are (`model.eval()`), trained through",
    test="test_sync_batch_norm_in_evaluation",
    note="With statistics of the batch torch computes it on GPUs only. On CPUs DDP refuses it in any case.",
)
def sync_batch_norm(job: Job) -> None:
    model, optimizer = job.prepare(nn.SyncBatchNorm.convert_sync_batchnorm(ResNet()), blocks=(Residual,))
    model.eval()
    for x in job.batches(3, 3, 8, 8):
        job.train(model, optimizer, x)
    job.see("buffers", [buffer.clone() for buffer in model.buffers()])


@case(
    "lists and dicts of parameters, modules without forward, modules without parameters",
    test="test_containers_without_forward_and_modules_without_parameters",
)
def containers(job: Job) -> None:
    model = Contained()
    model.named["y"] = nn.Parameter(torch.full((1,), 2.0))  # 0-dim ones have a row of their own
    model, optimizer = job.prepare(model, blocks=(nn.Linear,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case("two models with two optimizers (GAN), `requires_grad` switched each step", test="test_a_gan_with_two_optimizers")
def gan(job: Job) -> None:
    g, of_g = job.prepare(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)), blocks=(nn.Linear,))
    d, of_d = job.prepare(nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 1)), blocks=(nn.Linear,))
    for step in range(3):
        noise, real = job.batch(step), job.batch(50 + step, 4)
        d.requires_grad_(True)
        g.requires_grad_(False)
        job.backward(d(g(noise).detach()).exp().mean() - d(real).mean(), d)
        of_d.step()
        of_d.zero_grad()
        d.requires_grad_(False)
        g.requires_grad_(True)
        job.backward(-d(g(noise)).mean(), g)
        of_g.step()
        of_g.zero_grad()


@case("layers unfrozen during training, `add_param_group`", test="test_unfreezing_layers_and_add_param_group")
def unfrozen(job: Job) -> None:
    model = MLP()
    for part in (model.inp, model.blocks[0]):
        part.requires_grad_(False)
    model, optimizer = job.prepare(model, lambda m: sgd(m, momentum=0.9))
    for step, x in enumerate(job.batches(6)):
        inner = job.unwrapped(model)
        part = {2: inner.blocks[0], 4: inner.inp}.get(step)
        if part is not None:
            part.requires_grad_(True)
            optimizer.add_param_group({"params": list(part.parameters()), "lr": 0.05})
        job.backward(loss_of(model(x)), model)
        optimizer.step()
        optimizer.zero_grad()
