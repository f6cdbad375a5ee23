"""What is read of the system's limits on memory, and what all ranks say where a host is short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import ranks
from torch_shard.errors import HostMemoryError, ShardError
from torch_shard.offload import memory_limits
from torch_shard.offload.memory_limits import Limit, available, check, limits

GIB = 1 << 30
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\n"  # 8 GiB available


def system(root: Path, cgroup: str = "", mounts: str = "", meminfo: str = MEMINFO, **groups: dict[str, str]) -> Path:
    """A machine's proc and sys; `groups`: files of control groups by folder ("__" for "/")."""
    own = root / "proc/self"
    own.mkdir(parents=True)
    (root / "proc/meminfo").write_text(meminfo)
    (own / "cgroup").write_text(cgroup)
    (own / "mountinfo").write_text(mounts)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, files in groups.items():
        folder = root / "sys/fs/cgroup" / name.replace("__", "/")
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    return root


def rooms(root: Path) -> list[int]:
    return [limit.room for limit in limits(root)]


V2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 {} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def v2(limit: str, used: int, file: int = 0, **more: str) -> dict[str, str]:
    stat = f"anon 1\nfile {file}\ninactive_file {file // 2}\nactive_file {file - file // 2}\n"
    files = {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}
    return files | {name.replace("_", "."): text for name, text in more.items()}


def v1(limit: int, used: int, file: int = 0) -> dict[str, str]:
    stat = f"cache {file}\nactive_file 0\ntotal_inactive_file {file}\ntotal_active_file 0\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


def test_without_control_groups_it_is_what_the_machine_has_available(tmp_path):
    assert rooms(system(tmp_path)) == [8 * GIB]


def test_a_limit_of_version_2_counts_with_the_page_cache_as_free(tmp_path):
    root = system(tmp_path, "0::/job\n", V2, job=v2(str(4 * GIB), 3 * GIB, file=GIB))
    assert rooms(root) == [8 * GIB, 2 * GIB]


def test_the_groups_around_it_limit_a_group_too(tmp_path):
    root = system(tmp_path, "0::/a/b\n", V2, a=v2(str(3 * GIB), GIB), a__b=v2("max", GIB))
    assert rooms(root) == [8 * GIB, 2 * GIB]


def test_the_limit_above_which_the_kernel_slows_a_group_down_counts(tmp_path):
    root = system(tmp_path, "0::/job\n", V2, job=v2("max", GIB, memory_high=str(3 * GIB)))
    assert rooms(root) == [8 * GIB, 2 * GIB]


def test_a_limit_of_version_1_counts(tmp_path):
    cgroup = "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n"
    root = system(
        tmp_path, cgroup, V1.format("/"), memory__job=v1(4 * GIB, 2 * GIB, file=GIB), memory=v1(2**63 - 4096, 0)
    )
    assert rooms(root) == [8 * GIB, 3 * GIB]


def test_in_a_container_the_mount_shows_its_own_group(tmp_path):
    cgroup = "4:memory:/docker/123\n"
    root = system(tmp_path, cgroup, V1.format("/docker/123"), memory=v1(4 * GIB, GIB))
    assert rooms(root) == [8 * GIB, 3 * GIB]


def test_a_group_that_is_used_up_has_no_room(tmp_path):
    root = system(tmp_path, "0::/job\n", V2, job=v2(str(GIB), 2 * GIB))
    assert rooms(root) == [8 * GIB, 0]


def test_two_processes_have_a_limit_in_common_where_they_are_in_one_group(tmp_path):
    for name, cgroup in (("one", "0::/a/b\n"), ("two", "0::/a/c\n")):
        system(tmp_path / name, cgroup, V2, a=v2(str(3 * GIB), GIB), a__b=v2(str(GIB), 0), a__c=v2(str(GIB), 0))
    # One machine: the second process sees the first one's files.
    (tmp_path / "one/proc/self/cgroup").rename(tmp_path / "first")
    root = tmp_path / "two"
    of_c = {limit.key for limit in limits(root)}
    (root / "proc/self/cgroup").write_text((tmp_path / "first").read_text())
    of_b = {limit.key for limit in limits(root)}
    assert len(of_b) == len(of_c) == 3 and len(of_b & of_c) == 2  # the machine and group a


def test_a_system_without_proc_still_answers(tmp_path):
    (found,) = limits(tmp_path)
    assert found.is_machine and found.room > 0


def test_here_it_is_between_nothing_and_all_memory():
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    found = available()
    assert found is not None and 0 < found < total


def test_memory_that_is_taken_is_no_longer_available():
    before, taken = available(), []
    assert before is not None
    # The kernel keeps freed pages at hand for a while, which count as neither free nor used, and other processes come and go.
    for _ in range(6):
        taken.append(torch.ones(GIB // 4, dtype=torch.uint8))
        after = available()
        assert after is not None
        if before - after > GIB // 8:
            return
    pytest.fail(f"{before} before, {after} after {len(taken) * GIB // 4} were taken")


# -- all ranks together -----------------------------------------------------------------------------------------------


def gather(tensor: torch.Tensor) -> torch.Tensor:
    out = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(out, tensor)
    return torch.stack(out)


def machine(name: str, gib: float) -> Limit:
    return Limit(f"machine {name}", int(gib * GIB), is_machine=True)


def group(name: str, gib: float) -> Limit:
    return Limit(f"group {name}", int(gib * GIB), is_machine=False)


@ranks(2)
def test_what_the_ranks_of_a_host_need_is_added_up(rank):
    one = [machine("a", 8)]
    check(3 * GIB, gather, known=one)
    with pytest.raises(HostMemoryError) as raised:
        check((4 + rank) * GIB, gather, known=one, remedy="Keep less.")
    text = str(raised.value)
    for figure in (
        "rank 0: 4.00 GiB",
        "rank 1: 5.00 GiB",
        "9.00 GiB",
        "8.00 GiB are available",
        "short of memory by 2.00 GiB",
    ):
        assert figure in text
    assert "1.00 GiB stay free" in text and text.endswith("Keep less.")
    assert isinstance(raised.value, ShardError)


@ranks(2)
def test_ranks_of_two_hosts_are_not_added_up_and_both_hear_of_the_short_one(rank):
    own = [machine("ab"[rank], 8)]
    check(6 * GIB, gather, known=own)
    with pytest.raises(HostMemoryError, match=r"\(rank 1: 9\.00 GiB\)"):
        check((6, 9)[rank] * GIB, gather, known=own)


@ranks(2)
def test_containers_of_one_machine_have_limits_of_their_own_and_the_machine_in_common(rank):
    own = [machine("a", 16), group("xy"[rank], 6)]
    check(5 * GIB, gather, known=own)
    with pytest.raises(HostMemoryError, match=r"\(rank 0: 6\.00 GiB\).*control group"):
        check((6, 2)[rank] * GIB, gather, known=own)
    with pytest.raises(HostMemoryError, match=r"rank 0: 5\.00 GiB, rank 1: 5\.00 GiB.*in the machine"):
        check(5 * GIB, gather, known=[machine("a", 10), group("xy"[rank], 6)])


@ranks(2)
def test_the_smaller_of_two_readings_of_a_limit_counts(rank):
    with pytest.raises(HostMemoryError, match=r"4\.00 GiB are available"):
        check(2 * GIB, gather, known=[machine("a", (8, 4)[rank])])


@ranks(2)
def test_a_rank_that_needs_nothing_hears_of_it_too(rank):
    with pytest.raises(HostMemoryError, match=r"rank 0: 0 bytes, rank 1: 8\.00 GiB"):
        check((0, 8)[rank] * GIB, gather, known=[machine("a", 8)])


@ranks(2)
def test_what_is_read_here_lets_a_little_pass_and_refuses_more_than_there_is(rank):
    check(1 << 20, gather, reserve=0)
    with pytest.raises(HostMemoryError, match=rf"rank {rank}: 1024\.00 GiB"):
        check(1 << 40, gather)


def test_a_rank_that_is_alone_needs_no_process_group():
    check(GIB, known=[machine("a", 2)])
    with pytest.raises(HostMemoryError):
        check(GIB + 1, known=[machine("a", 2)])


def test_where_nothing_needs_memory_a_full_machine_is_no_error():
    check(0, known=[machine("a", 0)])


def test_where_the_system_says_nothing_nothing_is_refused():
    check(1 << 50, known=[])


def test_more_limits_than_a_message_holds_keep_the_machine_and_the_tightest():
    many = [group(str(n), 100 + n) for n in range(40)]
    with pytest.raises(HostMemoryError):
        check(2 * GIB, known=[*many, machine("a", 2)])
    with pytest.raises(HostMemoryError):
        check(2 * GIB, known=[machine("a", 500), *many, group("tight", 2)])


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (5 * GIB, "5.00 GiB")]
)
def test_sizes_in_messages(nbytes, text):
    assert memory_limits.formatted(nbytes) == text
