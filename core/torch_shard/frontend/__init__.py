"""Everything below the public names that a front end needs, and the only private door to the engine.

``lightning_shard`` and ``accelerate_shard`` import the public names of :mod:`torch_shard` and what stands here, nothing else;
a front end of another framework would do the same. Checkpoints are in :mod:`torch_shard.frontend.checkpoint`, which is a
module of its own because it imports torch's distributed checkpoints. Unlike the public names, these may change in any release.
"""

from __future__ import annotations

from .. import clip_together, full_state, meeting, named_state, owned_state
from ..buffers import broadcast_coalesced
from ..by_object import ByObject
from ..casting import cast, cast_outputs
from ..clip_together import clip_norm, engines_over, limit_values
from ..config import Strategy
from ..deferred import Deferred, defer, deferred_of
from ..full_state import make_whole, refuse_inside
from ..gathered import gathered
from ..group_timeout import group_timeout
from ..groups import told_by
from ..layer_classes import classes_named
from ..meeting import meet
from ..named_state import load_optim_state_dict
from ..precision import for_autocast, precision_of
from ..runtime import Runtime
from ..shard_spec import same_cut, slice_full
from ..statistics import Statistics
from ..step_checks import refusal_of
from ..versions import reduce_scatter_single
from ..watch import default_store
from ..whole import agree, anywhere

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
