"""Everything below the public names that a front end needs, and the only private door to the engine.

``lightning_shard`` and ``accelerate_shard`` import the public names of :mod:`torch_shard` and what stands here, nothing else;
a front end of another framework would do the same. Checkpoints are in :mod:`torch_shard.frontend.checkpoint`, which is a
module of its own because it imports torch's distributed checkpoints. Unlike the public names, these may change in any release.
"""

from __future__ import annotations

from ..comm.broadcast_buffers import broadcast_coalesced
from ..comm.consensus import agree, anywhere
from ..comm.process_group_ops import reduce_scatter_single
from ..comm.process_groups import group_timeout
from ..comm.rendezvous import told_by
from ..comm.traffic_statistics import Statistics
from ..comm.work import default_store
from ..config.precision import for_autocast, precision_of
from ..config.shard_config import Strategy
from ..offload.memory_limits import available as free_host_bytes
from ..optim.checks import refusal_of
from ..optim.matrix import state as owned_state
from ..plan.layer_selection import classes_named
from ..runtime import barrier as meeting
from ..runtime.barrier import meet
from ..runtime.mixed_precision_hooks import cast, cast_outputs
from ..runtime.runtime import Runtime
from ..setup.lazy_param import Deferred, defer, deferred_of
from ..shard_tensor.spec import same_cut, slice_full
from ..state import model_state as full_state
from ..state import optimizer_state as named_state
from ..state.model_state import make_whole, refuse_inside
from ..state.optimizer_state import load_optim_state_dict
from ..unshard.gathered import gathered
from ..utils.weak_id_map import ByObject
from . import clipping as clip_together
from .clipping import clip_norm, engines_over, limit_values

__all__ = [
    "ByObject",
    "Deferred",
    "Runtime",
    "Statistics",
    "Strategy",
    "agree",
    "anywhere",
    "broadcast_coalesced",
    "cast",
    "cast_outputs",
    "classes_named",
    "clip_norm",
    "clip_together",
    "default_store",
    "defer",
    "deferred_of",
    "engines_over",
    "for_autocast",
    "free_host_bytes",
    "full_state",
    "gathered",
    "group_timeout",
    "limit_values",
    "load_optim_state_dict",
    "make_whole",
    "meet",
    "meeting",
    "named_state",
    "owned_state",
    "precision_of",
    "reduce_scatter_single",
    "refusal_of",
    "refuse_inside",
    "same_cut",
    "slice_full",
    "told_by",
]
