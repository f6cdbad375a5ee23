"""Detection of forwards that an interrupt has ended.

torch calls forward hooks after a forward that an Exception has ended, but not after one that a KeyboardInterrupt or a
SystemExit has ended. Such a forward shows only in that its frame is no longer on Python's stack.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch.nn.modules import module

from ..utils.thread_frames import frames_of_threads


def forward_frame() -> FrameType | None:
    """Return the frame of the ``Module.__call__`` that runs the calling hook; None where the compiler has left no frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != module.__file__:
        frame = frame.f_back
    return frame


def ended(*nested: list[FrameType | None]) -> set[FrameType]:
    """Return those of the frames that no thread runs any more. In each list a frame is inside the one before it."""
    innermost = [frames[-1] for frames in nested if frames]
    if all(frame is None or _is_in(sys._getframe(1), frame) for frame in innermost):
        return set()  # where the innermost frame runs, so do those around it
    stacks = list(frames_of_threads().values())  # a forward may run in another thread
    known = {frame for frames in nested for frame in frames if frame is not None}
    return {frame for frame in known if not any(_is_in(stack, frame) for stack in stacks)}


def _is_in(stack: FrameType | None, frame: FrameType) -> bool:
    while stack is not None:
        if stack is frame:
            return True
        stack = stack.f_back
    return False
