"""The command line itself: as a program, its exit codes, its progress bar, and how it ends when it is ended."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest

from tests.support.run_python import run_python
from torch_shard.cli import main
from torch_shard.cli.output import plain, size


@pytest.mark.exhaustive
def test_it_runs_as_a_program(tmp_path):
    done = run_python("-m", "torch_shard", "verify", tmp_path / "nothing", "--json", expected=2)
    assert done.stdout == "" and done.stderr == f"torch-shard: there is no checkpoint at {tmp_path / 'nothing'}.\n"


def test_usage_errors_and_help(capsys):
    for line in ("", "inspect", "unknown", "convert a b", "consolidate a b --dtype int8"):
        assert main(line.split()) == 2
    assert main(["--version"]) == main(["--help"]) == main(["verify", "--help"]) == 0
    assert "exit codes" in capsys.readouterr().out


def test_values_of_options_are_checked(made, tmp_path, cli):
    assert "--max-shard-size" in cli(
        "consolidate", made / "ours", tmp_path / "x.pt", "--max-shard-size", "big", expected=2
    )
    assert "no place" in cli("convert", made / "ours", "/", "--to", "sharded", "--overwrite", expected=2)


@pytest.mark.exhaustive
def test_a_reader_that_goes_away_is_no_error(made):
    program = [sys.executable, "-m", "torch_shard", "inspect", str(made / "ours")]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141


@pytest.mark.exhaustive
def test_ctrl_c_leaves_nothing_and_exits_130(made, tmp_path):
    code = (
        "import sys, time, torch_shard.checkpoint.format.torch_file as s\n"
        "from torch_shard.cli import main\n"
        "write = s.TorchFileWriter.write\n"
        "def slow(self, slot, tensor):\n"
        "    write(self, slot, tensor); print('writing', flush=True); time.sleep(30)\n"
        "s.TorchFileWriter.write = slow\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = [sys.executable, "-c", code, "consolidate", str(made / "ours"), str(tmp_path / "x.pt")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
    assert process.stdout.readline() == "writing\n"
    assert len(os.listdir(tmp_path)) == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130 and process.stderr.read() == "torch-shard: interrupted\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.exhaustive
def test_the_progress_bar_is_for_terminals_and_json_is_all_that_is_printed(made, tmp_path):
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    arguments = ["convert", str(made / "wide"), str(tmp_path / "x"), "--to", "sharded", "--json"]
    program = [sys.executable, "-m", "torch_shard", *arguments]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=child, env=environment())
    os.close(child)
    seen = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    assert process.wait() == 0 and b"sharded:" in seen and b"B/s" in seen
    assert json.loads(process.stdout.read())["tensors"] == 16
    os.close(parent)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_540, "1.54 kB"), (999_600, "1 MB"), (5 * 10**9, "5 GB")],
)
def test_sizes(nbytes, text):
    assert size(nbytes) == text


def test_what_json_does_not_have_is_text():
    assert plain({1: float("nan"), "x": (float("inf"), b"1")}) == {"1": "nan", "x": ["inf", "b'1'"]}
