"""The copies of the checkout: one whose tests are recorded, others that are mutated; and the commands that run in them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from tools.mutants import settings

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MUTANTS_BUILD", CHECKOUT / "build" / "mutants"))
TREE = Path(os.environ.get("MUTANTS_TREE", BUILD / "tree"))  # in the copy itself the variable says where it is
RECORD = BUILD / "coverage"


def lanes(count: int) -> list[Path]:
    """Return the copies in which `count` mutants run side by side. :data:`TREE` is none of them, and never mutated."""
    return [TREE.with_name(f"{TREE.name}-{number}") for number in range(1, count + 1)]


def sync(copy: Path) -> None:
    """Make a copy equal to the checkout: its tracked files, and new ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        capture_output=True,
        check=True,
    )
    names = {name for name in listed.stdout.decode().split("\0") if name and (CHECKOUT / name).is_file()}
    for old in [path for path in copy.rglob("*") if path.is_file() and path.suffix != ".pyc"]:
        if str(old.relative_to(copy)) not in names:
            old.unlink()
    for name in names:
        source, target = CHECKOUT / name, copy / name
        # What is equal keeps its time, hence its compiled form.
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def begin(count: int) -> None:
    """Prepare build/mutants, for this process alone. What it holds about other sources is thrown away."""
    BUILD.mkdir(parents=True, exist_ok=True)
    lock = os.open(BUILD / "lock", os.O_CREAT | os.O_RDWR)  # until this process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another run is at work in {BUILD}") from None
    copies = [TREE, *lanes(count)]
    for copy in copies:
        sync(copy)
    mark, now = BUILD / "sources", digest()
    if mark.exists() and mark.read_text() != now:
        print("the mutated sources have changed since the last run: everything begins anew")
        for old in BUILD.iterdir():
            if old not in (*copies, BUILD / "lock"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
    mark.write_text(now)


def files(part: str) -> list[Path]:
    """Return the files of a part, in the copy."""
    found = {path for pattern in settings.PARTS[part] for path in (TREE / settings.ENGINE).glob(pattern)}
    missing = [p for p in settings.PARTS[part] if not list((TREE / settings.ENGINE).glob(p))]
    if missing:
        raise SystemExit(f"tools/mutants/settings.py: part {part!r} names {', '.join(missing)}, which match no file")
    return sorted(found)


def digest() -> str:
    """Return what tells the mutated sources, and which mutants are drawn from them, from others."""
    found = hashlib.sha256(
        repr((settings.SEED, settings.COUNT, settings.PARTS, settings.OPERATORS, settings.NUMBERS)).encode()
    )
    for path in sorted((TREE / settings.ENGINE).rglob("*.py")):
        found.update(str(path.relative_to(TREE)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


@cache
def version(test: str) -> str:
    """Return what tells a test's file from other states of it."""
    file = TREE / test.partition("::")[0]
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else ""


def environment(**more: object) -> dict[str, str]:
    """Return the variables for programs that run the copy, and not what is installed."""
    search = [more.pop("path", ""), TREE / Path(settings.ENGINE).parent, TREE]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(p) for p in search if p),
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in more.items()},
    }


def pytest(*arguments: object) -> list[str]:
    """Return the command line of pytest, to run in the copy."""
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header", "-q", *map(str, arguments)]
