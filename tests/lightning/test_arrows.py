"""The structure of lightning_shard: its rooms import downwards only. ``tests/repo/test_arrows.py`` holds what it may name."""

from __future__ import annotations

from tests.repo.test_arrows import ROOT, files_of, imports_of

PACKAGE = ROOT / "lightning_shard"
BELOW = {
    "_private": set(),
    "registration": set(),
    "strategy": {"_private"},
    "checkpoint": {"_private", "strategy"},
    "trainer": {"_private", "strategy", "checkpoint"},
    "fabric": {"_private", "strategy", "checkpoint"},
    "monitor": {"_private"},
    "run": {"_private", "registration", "strategy", "fabric", "for_lightning", "for_pytorch_lightning"},
}
"""What each room may import beside itself. The modules for one namespace of Lightning lie flat, or in fabric, above all rooms
but run, which derives from their strategies."""


def test_rooms_import_downwards_only():
    upward = []
    for file in files_of(PACKAGE):
        room = file.relative_to(PACKAGE).with_suffix("").parts[0]
        for each in imports_of(file) if room in BELOW else ():
            package, *rooms = each.target.split(".")
            if package == "lightning_shard" and rooms and rooms[0] not in {room, *BELOW[room]}:
                upward.append(str(each))
    assert upward == []
