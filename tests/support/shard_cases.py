"""What can be done with a tensor, sorted by what a ShardTensor makes of it."""

import math

import numpy as np
import torch
from torch import nn

F = nn.functional

UNARY = [
    lambda a: a * 2 + 1,
    lambda a: 1 - a,
    lambda a: 2**a,
    lambda a: a**2,
    lambda a: -a,
    lambda a: abs(a),
    lambda a: a > 0,
    lambda a: a.clamp(-0.5, 0.5),
    lambda a: a.sqrt().nan_to_num(),
    lambda a: a.sign() * a.abs().pow(0.5),
    lambda a: torch.where(a > 0, a, 0.1 * a),
    lambda a: torch.where(a.isnan(), torch.zeros_like(a), a),
    lambda a: a.masked_fill(a > 0, 3.0),
    lambda a: torch.zeros_like(a),
    lambda a: torch.ones_like(a),
    lambda a: torch.full_like(a, 4.0),
    lambda a: a.new_zeros(a.shape),
    lambda a: a.clone().fill_(2.0),
    lambda a: a.double(),
    lambda a: a.to(torch.bfloat16),
    lambda a: a.detach().clone().zero_(),
    lambda a: F.gelu(a) + F.silu(a) + torch.tanh(a) + F.relu(a) + F.softplus(a),
    lambda a: a / torch.tensor(3.0, dtype=torch.float64),
    lambda a: torch.tensor(3.0) - a,
    lambda a: a.lerp(torch.ones_like(a), 0.25),
    lambda a: a.addcmul(a, a, value=0.5),
    lambda a: a.addcdiv(a, a.abs() + 1, value=0.5),
    lambda a: a.view_as(a) + a.expand_as(a),
    lambda a: (a > 0) & (a < 1) | ~(a > -1),
    lambda a: a.maximum(a * a).minimum(torch.tensor(0.7)),
]
"""Computed on each rank's elements alone; the result is sharded."""

REDUCTIONS = [
    lambda a: a.sum(),
    lambda a: torch.sum(a, dtype=torch.float64),
    lambda a: a.mean(),
    lambda a: a.norm(),
    lambda a: a.norm(1),
    lambda a: a.norm(math.inf),
    lambda a: a.norm(-math.inf),
    lambda a: a.norm(0),
    lambda a: a.norm(3.5),
    lambda a: torch.linalg.vector_norm(a, 2, dtype=torch.float64),
    lambda a: torch.linalg.vector_norm(a, keepdim=True),
    lambda a: torch.linalg.norm(a),
    lambda a: a.sum(dim=tuple(range(a.dim())), keepdim=True),
    lambda a: a.max(),
    lambda a: a.min(),
    lambda a: a.amax(),
    lambda a: a.amin(),
    lambda a: a.std(),
    lambda a: a.var(unbiased=False),
    lambda a: a.var(correction=2),
    lambda a: (a > 0).any(),
    lambda a: (a > -10).all(),
    lambda a: (a > 0.5).sum(),
    lambda a: a.count_nonzero(),
    lambda a: a.isnan().any(),
    lambda a: a.isfinite().all(),
]
"""One number, the same on all ranks."""

VIEWED = [
    lambda p: p[0],
    lambda p: p[-1, 2:5],
    lambda p: p[1:4],
    lambda p: p.t(),
    lambda p: p.T,
    lambda p: p.view(-1),
    lambda p: p.flatten(),
    lambda p: p.ravel(),
    lambda p: p.reshape(7, 5),
    lambda p: p.view(5, 7, 1).permute(2, 1, 0),
    lambda p: p.view(-1)[30:],
    lambda p: p.reshape(-1)[3],
    lambda p: list(p),
    lambda p: p.split(2),
    lambda p: p.tensor_split(3)[1],
    lambda p: p.chunk(2)[1].unsqueeze(0).squeeze(),
    lambda p: p[2:2],
    lambda p: p[None, ..., None],
    lambda p: p.unflatten(0, (1, 5)),
]
"""For a matrix of 5 x 7: views without gaps in memory."""

GATHERED = [
    lambda p: p @ torch.ones(7, 2),
    lambda p: torch.ones(2, 5) @ p,
    lambda p: F.linear(torch.ones(2, 7), p),
    lambda p: F.embedding(torch.tensor([0]), p),
    lambda p: torch.einsum("ij,kj->ik", p, p),
    lambda p: p.sum(0),
    lambda p: p.mean(dim=1, keepdim=True),
    lambda p: p.norm(dim=0),
    lambda p: p.max(dim=0),
    lambda p: p.argmax(),
    lambda p: p.softmax(-1),
    lambda p: p.cumsum(0),
    lambda p: p.sort(),
    lambda p: p.median(),
    lambda p: p.quantile(0.3),
    lambda p: torch.linalg.norm(p, 2),
    lambda p: torch.linalg.svdvals(p),
    lambda p: torch.stack([p, p]),
    lambda p: torch.cat([p, p]),
    lambda p: p.nonzero(),
    lambda p: p[p > 0],
    lambda p: p[[3, 0]],
    lambda p: p.mul(torch.ones(2, 5, 7)),
    lambda p: p - p[0],
    lambda p: p.cov(),
    lambda p: p.repeat(2, 1),
    lambda p: p.index_select(0, torch.tensor([0])),
    lambda p: p.t().reshape(-1),
    lambda p: p.flip(0),
    lambda p: torch.where(p > 0),
    lambda p: torch.mvlgamma(p.detach() + 9, 2).sum(0),
    lambda p: torch.mul(torch.ones(5, 7), p.detach(), out=torch.empty(5, 7)),
    lambda p: torch.ones(5, 7).copy_(p.detach()),
    lambda p: torch.ones(2, 5, 7).mul_(p.detach()),
    lambda p: nn.utils.parameters_to_vector([p, p]),
]
"""For such a matrix: plain torch computes them into new memory, from all elements. (Not on parameters: what is computed from one
is gathered in another way, so the last few.)"""

REFUSED = [
    lambda p: p[:, 1],
    lambda p: p[::2],
    lambda p: p.diagonal(),
    lambda p: p.expand(2, 5, 7),
    lambda p: p.unfold(0, 2, 1),
    lambda p: p.view(torch.int32),
    lambda p: p.as_strided((3,), (1,), 2),
    lambda p: p.detach().t_(),
    lambda p: p.detach().squeeze_(),
    lambda p: p.data_ptr(),
    lambda p: p.untyped_storage(),
    lambda p: nn.init.orthogonal_(p),
]
"""For such a matrix: what would hand out memory of no shard."""

COPIED_OUT = [lambda p: p.tolist(), lambda p: p.numpy(), np.asarray]
"""For such a matrix: Python numbers and arrays of all of it."""

NEEDS_FULL = [*VIEWED, *GATHERED[:-6], *REFUSED, *COPIED_OUT]
"""For such a matrix, of a parameter that no engine gathers."""
