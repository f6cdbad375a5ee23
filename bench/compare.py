"""What trains as in plain PyTorch, and what does not: peculiar scripts under DDP, FSDP1, FSDP2, ZeRO-3 and torch_shard.

    python bench/compare.py                          all cases, on two Gloo ranks on the CPU
    python bench/compare.py --only 'clip|norm'       those whose text or name matches
    python bench/compare.py --engines ddp,ours       some columns
    python bench/compare.py --cases my_cases.py      cases of your own: see compare/case.py
    python bench/compare.py --write                  into README.md and docs/compared.md

Each case is a script that is written once. It runs in one process without any engine, on the whole batch, and under each engine
on two ranks, each with half of it. P: all parameters agree in the end, and all else that the script looks at. E: an error. W:
wrong without an error. H: it hangs. An engine has processes of its own, which go on from case to case until one fails.

The exit status is 1 if torch_shard does not do what it promises: P, or E in the second table. ZeRO-3 needs DeepSpeed
(`pip install deepspeed`), which compiles an extension at its first start.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from compare.case import CASES, Case, load_cases
from compare.engines import ENGINES
from compare.ranks import Outcome, Ranks
from compare.report import Row, notes, reasons, table, versions, write
from compare.verdict import Verdict, judge

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
IN_README = ("a_method", "optimizer_before", "gradient_penalty", "torchs_clipping")


def run_under(engine: str, names: Sequence[str], dtype: torch.dtype, args: argparse.Namespace) -> dict[str, Outcome]:
    """Run cases under one engine, or plainly, in a process that has run nothing else; return what became of each."""
    ranks = Ranks(engine, 1 if engine == "plain" else RANKS, dtype)
    outcomes = {}
    try:
        for case in CASES:
            if case.name in names:
                progress(f"{ENGINES[engine].label}: {case.text}")
                outcomes[case.name] = ranks.run(case.name, case.timeout or args.timeout)
    finally:
        ranks.close()
    return outcomes


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def run(cases: Sequence[Case], engines: Sequence[str], args: argparse.Namespace) -> list[Row]:
    """Run cases under all engines and judge them."""
    names = [case.name for case in cases]
    importlib.import_module("torch._dynamo")  # what any optimizer's step needs, once for all

    def outcomes_of(engine: str, dtype: torch.dtype) -> dict[str, Outcome]:
        # A process for each, so that no engine has been imported beside another. It is forked, as its ranks are from it: until
        # all have run nothing may be computed here.
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            return pool.submit(run_under, engine, names, dtype, args).result()

    plain = {dtype: outcomes_of("plain", dtype) for dtype in dict.fromkeys(ENGINES[name].dtype for name in engines)}
    for outcomes in plain.values():
        for name, outcome in outcomes.items():
            if outcome.kind != "done":
                raise RuntimeError(f"{name} fails without any engine: {outcome.text}")
    found = {engine: outcomes_of(engine, ENGINES[engine].dtype) for engine in engines}
    progress("")

    def verdict(case: Case, engine: str) -> Verdict:
        dtype = ENGINES[engine].dtype
        return judge(case, found[engine][case.name], plain[dtype][case.name], dtype)

    return [(case, {engine: verdict(case, engine) for engine in engines}) for case in cases]


def parse() -> argparse.Namespace:
    known = [name for name in ENGINES if name != "plain"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="a regular expression for the text or the name of cases"
    )
    parser.add_argument("--engines", default=",".join(known), help="some of: %(default)s")
    parser.add_argument("--cases", metavar="FILE", help="a Python file with cases, in place of those here")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds until ranks are held to hang; default 20")
    parser.add_argument("--reasons", action="store_true", help="say why a cell is not P")
    parser.add_argument("--json", metavar="FILE", help="write all of it, with tracebacks, there")
    parser.add_argument("--write", action="store_true", help="write the tables into README.md and docs/compared.md")
    args = parser.parse_args()
    args.engines = args.engines.split(",")
    for name in args.engines:
        if name not in known:
            parser.error(f"--engines: {name!r} is not one of {', '.join(known)}")
    if args.write and (args.only or args.cases):
        parser.error("--write: the documentation has all cases; leave out --only and --cases")
    return args


def main() -> None:
    args = parse()
    # Inherited by the ranks. Gloo would look up the host's name, which some machines can't resolve.
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    load_cases(args.cases)
    cases = [c for c in CASES if any(re.search(args.only, name, flags=re.I) for name in (c.text, c.name))]
    if not cases:
        sys.exit(f"no case matches {args.only!r}")
    missing = [name for name in args.engines if ENGINES[name].missing()]
    engines = [name for name in args.engines if name not in missing]
    rows = run(cases, engines, args)
    trained, refused = ([row for row in rows if row[0].refused is kind] for kind in (False, True))

    ran = versions(engines, missing, RANKS)
    print(ran)
    for some in filter(None, (trained, refused)):
        print(f"\n{table(some, engines)}")
    if args.reasons:
        print(f"\n{reasons(rows, engines)}")
    if args.json:
        result = {case.name: {name: v.as_dict() for name, v in verdicts.items()} for case, verdicts in rows}
        Path(args.json).write_text(json.dumps({"versions": ran, "cases": result}, indent=1))
    if args.write:
        page = ROOT / "docs" / "compared.md"
        write(page, "versions", ran)
        write(page, "trained", table(trained, engines, tests=True))
        write(page, "refused", table(refused, engines, tests=True))
        write(page, "notes", notes(rows))
        write(ROOT / "README.md", "compare", table([r for r in rows if r[0].name in IN_README], engines))
    sys.exit(any(v["ours"].letter not in ("PE" if c.refused else "P") for c, v in rows if "ours" in v))


if __name__ == "__main__":
    main()
