"""Forwards that an interrupt has ended.

torch calls the hooks behind a forward that has ended with an Exception, but not behind one that a KeyboardInterrupt or a
SystemExit has ended. That shows in Python's stack alone: the frame in which the forward ran is not in it any more.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

from torch.nn.modules import module

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["forward_frame", "leave_interrupted"]


def forward_frame() -> FrameType | None:
    """The frame of ``Module.__call__`` whose hook has called this; None where the compiler has left none, so that nothing is
    known."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != module.__file__:
        frame = frame.f_back
    return frame


def leave_interrupted(runtime: Runtime) -> None:
    """Do what the hooks of interrupted forwards would have done. Not collective."""
    innermost = [entry[-1] for entry in runtime.frames[-1:]] + runtime.roots[-1:]
    if all(frame is None or _is_in(sys._getframe(1), frame) for frame in innermost):
        return  # and so are those around them
    stacks = list(sys._current_frames().values())  # a forward may run in another thread

    def ended(frame: FrameType | None) -> bool:
        return frame is not None and not any(_is_in(stack, frame) for stack in stacks)

    for entry in [entry for entry in runtime.frames if ended(entry[-1])]:
        runtime.frames.remove(entry)
        runtime.leave(entry[0], entry[2])
    for root in [root for root in runtime.roots if ended(root)]:
        runtime.roots.remove(root)
        runtime.finished()
    runtime.on_demand.check_copies()


def _is_in(stack: FrameType | None, frame: FrameType) -> bool:
    while stack is not None:
        if stack is frame:
            return True
        stack = stack.f_back
    return False
