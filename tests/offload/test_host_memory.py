"""What is read of the system's limits on memory, and what all ranks say where a host is short."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import ranks
from torch_shard.errors import HostMemoryError, ShardError
from torch_shard.offload import memory_limits
from torch_shard.offload.memory_limits import Limit, check, limits

GIB = 1 << 30
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\n"  # 8 GiB available


def system(root: Path, own: str = "/", **groups: dict[str, str]) -> Path:
    """A machine's proc and sys. `own`: this process's control group; `groups`: files of groups by folder ("__" for "/")."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(f"4:memory:/other\n0::{own}\n")
    for name, files in groups.items():
        folder = root / "sys/fs/cgroup" / name.replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    return root


def rooms(root: Path) -> list[int]:
    return sorted((limit.room for limit in limits(root)), reverse=True)


def files(limit: str, used: int, cache: int = 0, high: str = "max") -> dict[str, str]:
    """Of one control group."""
    stat = f"anon 1\nfile {cache}\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}\n"
    return {"memory.max": f"{limit}\n", "memory.high": high, "memory.current": f"{used}\n", "memory.stat": stat}


def files_of_version_1(limit: int, used: int, cache: int = 0) -> dict[str, str]:
    stat = f"inactive_file 0\ntotal_inactive_file {cache // 2}\ntotal_active_file {cache - cache // 2}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


CONTAINER = {"": files(str(4 * GIB), GIB)}
ROOM = {
    "no control group": ("/", {}, [8]),
    "a limit, with the page cache as free": ("/job", {"job": files(str(4 * GIB), 3 * GIB, cache=GIB)}, [8, 2]),
    "a limit that is used up": ("/job", {"job": files(str(GIB), 2 * GIB)}, [8, 0]),
    "where the kernel slows down": ("/job", {"job": files("max", GIB, high=str(3 * GIB))}, [8, 2]),
    "a group around it": ("/a/b", {"a": files(str(3 * GIB), GIB), "a__b": files("max", GIB)}, [8, 2]),
    # In a container its own group is the top of the tree; its path is that within, or outside, where nothing can be read.
    "a container": ("/", CONTAINER, [8, 3]),
    "a container, by its path": ("/docker/123", CONTAINER, [8, 3]),
    "a container, by a path outside": ("/../other", CONTAINER, [8, 3]),
}


@pytest.mark.parametrize("case", ROOM)
def test_room_is_what_the_machine_has_available_and_what_each_control_group_allows(tmp_path, case):
    own, groups, gib = ROOM[case]
    assert rooms(system(tmp_path, own, **groups)) == [room * GIB for room in gib]


def test_a_limit_of_version_1_counts(tmp_path):
    """Its hierarchy lies in a folder of its own, and shows from the container's group on."""
    root = system(tmp_path, memory=files_of_version_1(4 * GIB, 3 * GIB, cache=GIB))
    (root / "proc/self/cgroup").write_text("5:cpu,memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/docker/abc\n")
    assert rooms(root) == [8 * GIB, 2 * GIB]


def test_groups_of_version_1_are_nested(tmp_path):
    unlimited = files_of_version_1((1 << 63) - 4096, GIB)
    root = system(tmp_path, memory=unlimited, memory__a=files_of_version_1(3 * GIB, GIB), memory__a__b=unlimited)
    (root / "proc/self/cgroup").write_text("5:memory:/a/b\n")
    assert [room for room in rooms(root) if room < 8 * GIB] == [2 * GIB]


def test_two_processes_have_a_limit_in_common_where_they_are_in_one_group(tmp_path):
    root = system(tmp_path, a=files(str(3 * GIB), GIB), a__b=files(str(GIB), 0), a__c=files(str(GIB), 0))
    keys = []
    for own in ("/a/b", "/a/c"):
        (root / "proc/self/cgroup").write_text(f"0::{own}\n")
        keys.append({limit.key for limit in limits(root)})
    assert [len(found) for found in keys] == [3, 3] and len(keys[0] & keys[1]) == 2  # the machine and group a


def test_a_system_without_proc_still_answers(tmp_path):
    (found,) = limits(tmp_path)
    assert found.is_machine and found.room > 0


# -- all ranks together -----------------------------------------------------------------------------------------------


def gather(tensor: torch.Tensor, what: str) -> torch.Tensor:
    if not dist.is_initialized():
        return tensor.unsqueeze(0)
    out = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(out, tensor)
    return torch.stack(out)


COLLECTIVES = SimpleNamespace(backend="gloo", all_ranks=SimpleNamespace(all_gather=gather))


def there_is(monkeypatch, *known: Limit) -> None:
    monkeypatch.setattr(memory_limits, "limits", lambda: known)


def machine(name: str, gib: float) -> Limit:
    return Limit(name, int(gib * GIB), is_machine=True)


def group(name: str, gib: float) -> Limit:
    return Limit(f"group {name}", int(gib * GIB), is_machine=False)


@ranks(2)
def test_what_the_ranks_of_a_host_need_is_added_up(rank, monkeypatch):
    there_is(monkeypatch, machine("a", 8))
    check(3 * GIB, COLLECTIVES)
    with pytest.raises(HostMemoryError) as raised:
        check((4 + rank) * GIB, COLLECTIVES)
    text = str(raised.value)
    for figure in (
        "rank 0: 4.00 GiB",
        "rank 1: 5.00 GiB",
        "9.00 GiB",
        "8.00 GiB are available in the machine",
        "short of memory by 2.00 GiB",
        "1.00 GiB stay free",
        "Build the model on the meta device",
    ):
        assert figure in text
    assert isinstance(raised.value, ShardError)
    with pytest.raises(HostMemoryError, match=r"rank 0: 0 bytes, rank 1: 8\.00 GiB"):
        check((0, 8)[rank] * GIB, COLLECTIVES)  # one that needs nothing hears of it, too


@ranks(2)
def test_ranks_of_two_hosts_are_not_added_up_and_both_hear_of_the_short_one(rank, monkeypatch):
    there_is(monkeypatch, machine("ab"[rank], 8))
    check(6 * GIB, COLLECTIVES)
    with pytest.raises(HostMemoryError, match=r"\(rank 1: 9\.00 GiB\)"):
        check((6, 9)[rank] * GIB, COLLECTIVES)


@ranks(2)
def test_containers_of_one_machine_have_limits_of_their_own_and_the_machine_in_common(rank, monkeypatch):
    there_is(monkeypatch, machine("a", 16), group("xy"[rank], 6))
    check(5 * GIB, COLLECTIVES)
    with pytest.raises(HostMemoryError, match=r"\(rank 0: 6\.00 GiB\).*control group"):
        check((6, 2)[rank] * GIB, COLLECTIVES)
    there_is(monkeypatch, machine("a", 10), group("xy"[rank], 6))
    with pytest.raises(HostMemoryError, match=r"rank 0: 5\.00 GiB, rank 1: 5\.00 GiB.*in the machine"):
        check(5 * GIB, COLLECTIVES)


@ranks(2)
def test_the_smaller_of_two_readings_of_a_limit_counts(rank, monkeypatch):
    there_is(monkeypatch, machine("a", (8, 4)[rank]))
    with pytest.raises(HostMemoryError, match=r"4\.00 GiB are available"):
        check(2 * GIB, COLLECTIVES)


def test_what_is_read_here_lets_a_little_pass_and_refuses_more_than_there_is():
    check(1 << 20, COLLECTIVES)
    with pytest.raises(HostMemoryError, match=r"rank 0: 1048576\.00 GiB"):
        check(1 << 50, COLLECTIVES)


def test_where_nothing_needs_memory_or_the_system_says_nothing_there_is_no_error(monkeypatch):
    there_is(monkeypatch, machine("a", 0))
    check(0, COLLECTIVES)
    there_is(monkeypatch)
    check(1 << 50, COLLECTIVES)
