"""``torch-shard inspect``: a description of a checkpoint, and a table of its parameters."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterator
from typing import Any

from ..checkpoint.format.manifest import dtype_name
from ..checkpoint.sharded.entry_tree import LIGHTNING, SavedOptimizer, Stored, leaves
from ..checkpoint.tools.classify import Parts, parts_of
from ..checkpoint.tools.open_any import Opened, open_checkpoint
from .output import print_json, short, size, table


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "inspect",
        help="show versions, sizes and a table of the parameters",
        description="Show a description of a checkpoint and a table of its parameters. Values are not read; `verify` reads them.",
    )
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("--units", action="store_true", help="list the sharded units")
    parser.add_argument("--files", action="store_true", help="list the files")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the description, and return the exit code."""
    opened = open_checkpoint(arguments.checkpoint)
    found = _description(opened, parts_of(opened))
    if arguments.json:
        print_json(found)
        return 0
    rows = [(head, text) for head, text in _header(found) if text]
    wide = max(len(head) for head, _ in rows)
    for head, text in rows:
        print(f"{head.ljust(wide)}  {text}")
    if arguments.units:
        print(f"\n{_units(found)}")
    if arguments.files:
        print(f"\n{table(['file', 'bytes'], [[name, f'{count:,}'] for name, count in found['files'].items()])}")
    print(f"\n{_table(found)}")
    return 0


# -- everything, for --json -------------------------------------------------------------------------------------------


def _description(opened: Opened, parts: Parts) -> dict[str, Any]:
    """Return the description of a checkpoint as nested plain values."""
    manifest = opened.manifest
    rows = list(_rows(opened, parts))
    distinct = [row for row in rows if row["tied_to"] is None]
    return {
        "path": str(opened.path),
        "format": opened.format,
        "format_version": getattr(manifest, "version", None),
        "saved_at": opened.saved_at,
        **{name: getattr(manifest, name, None) for name in ("torch", "torch_shard", "world_size", "strategy", "units")},
        "lightning": parts.extra.get(LIGHTNING) if parts.lightning else None,
        "tensors": len(distinct),
        "elements": sum(row["elements"] for row in distinct),
        "bytes": sum(row["bytes"] for row in distinct),
        "bytes_of_files": sum(opened.files.values()),
        "parameters": rows,
        "optimizers": {name: _optimizer(own) for name, own in parts.optimizers.items()},
        "extra": _extra(parts.extra),
        "other": {str(key): _nbytes(value) for key, value in parts.other.items()},
        "files": opened.files,
        "not_read": parts.refused,
    }


def _extra(extra: Any) -> list[str] | str | None:
    """Return the keys of ``extra``, or its shortened text if it is no dict."""
    if isinstance(extra, dict):
        return sorted(map(str, extra))
    return None if extra is None else short(extra)


def _rows(opened: Opened, parts: Parts) -> Iterator[dict[str, Any]]:
    manifest = opened.manifest
    # A converted checkpoint need not distinguish parameters from buffers.
    words = {True: "parameter", False: "frozen", None: None}
    kinds = {row["name"]: words[row["trainable"]] for row in manifest.parameters} if manifest else {}
    unit_of = {name: unit["name"] for unit in manifest.units for name in unit["parameters"]} if manifest else {}
    seen: dict[Any, str] = {}
    models = {"": parts.model, **{f"{name}.": model for name, model in parts.models.items()}}
    for prefix, model in models.items():
        for key, value in model.items():
            for path, leaf in leaves(value):
                if not isinstance(leaf, Stored):
                    continue
                name = ".".join(map(str, (f"{prefix}{key}", *path)))
                first = seen.setdefault(leaf.place, name)
                yield {
                    "name": name,
                    "kind": None if manifest is None else "tied" if first != name else kinds.get(name, "buffer"),
                    "shape": list(leaf.shape),
                    "dtype": dtype_name(leaf.dtype),
                    "elements": leaf.shape.numel(),
                    "bytes": leaf.nbytes,
                    "unit": unit_of.get(name),
                    "tied_to": None if first == name else first,
                    "optimizer_state": [
                        str(key) for own in parts.optimizers.values() for key in own.state.get(name, {})
                    ],
                    "files": list(leaf.files),
                }


def _optimizer(own: SavedOptimizer) -> dict[str, Any]:
    groups = []
    for group in own.groups:
        settings = {k: v.read() if isinstance(v, Stored) else v for k, v in group.items() if k != "params"}
        groups.append({"parameters": group.get("params") or [], "settings": settings})
    return {
        "by": "number" if own.is_numbered else "name",
        "parameters_with_state": len(own.state),
        "state": sorted({str(key) for entries in own.state.values() for key in entries}),
        "bytes": _nbytes(own.state),
        "groups": groups,
    }


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for _, leaf in leaves(tree) if isinstance(leaf, Stored))


# -- for people -------------------------------------------------------------------------------------------------------


_FORMATS = {
    "torch-shard": "sharded, of torch-shard-engine",
    "dcp": "sharded, of torch.distributed.checkpoint",
    "torch": "one file of torch.save",
    "safetensors": "safetensors",
}
_SHOWN = ("lr", "weight_decay", "betas", "momentum", "eps")


def _header(found: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield heads and texts of the lines above the table; a line without a text is not shown."""
    version = f", version {found['format_version']}" if found["format_version"] else ""
    saved = datetime.datetime.fromtimestamp(found["saved_at"]).astimezone()
    yield "checkpoint", found["path"]
    yield "format", f"{_FORMATS[found['format']]}{version}"
    yield "saved", saved.strftime("%Y-%m-%d %H:%M:%S %z")
    yield "by", found["torch"] and f"torch {found['torch']}, torch-shard-engine {found['torch_shard']}"
    yield "Lightning", found["lightning"]
    ranks = found["world_size"]
    yield "ranks", ranks and f"{ranks}, {found['strategy']}, {len(found['units'])} units"
    yield "model", f"{found['tensors']} tensors, {found['elements']:,} elements, {size(found['bytes'])}"
    for name, own in found["optimizers"].items():
        what = f"{own['parameters_with_state']} parameters, {', '.join(own['state']) or 'no state'}"
        groups = f"{len(own['groups'])} group{'s' * (len(own['groups']) != 1)}"
        yield f"optimizer {name}".strip(), f"{what}, {size(own['bytes'])}, {groups}"
        for number, group in enumerate(own["groups"]):
            settings = ", ".join(f"{k}={short(v, 20)}" for k, v in group["settings"].items() if k in _SHOWN)
            yield "", f"group {number}: {len(group['parameters'])} parameters, {settings}"
    extra = found["extra"]
    yield "extra", (", ".join(extra) or "empty") if isinstance(extra, list) else extra
    yield "beside them", ", ".join(found["other"])
    yield "files", f"{len(found['files'])}, {size(found['bytes_of_files'])}"
    yield from (("not read", text) for text in found["not_read"])


def _table(found: dict[str, Any]) -> str:
    rows = []
    for row in found["parameters"]:
        shape, state = "x".join(map(str, row["shape"])) or "scalar", ", ".join(row["optimizer_state"])
        cells = [row["name"], shape, row["dtype"], size(row["bytes"]), row["kind"] or "", _unit(row["unit"])]
        rows.append([*cells, f"= {row['tied_to']}" if row["tied_to"] else state])
    return table(["name", "shape", "dtype", "bytes", "kind", "unit", "optimizer state"], rows)


def _unit(name: str | None) -> str:
    return "" if name is None else name or "(root)"


def _units(found: dict[str, Any]) -> str:
    sizes = {row["name"]: row for row in found["parameters"]}
    rows = []
    for unit in found["units"] or ():
        own = [sizes[name] for name in unit["parameters"] if name in sizes]
        elements, nbytes = sum(row["elements"] for row in own), sum(row["bytes"] for row in own)
        rows.append([_unit(unit["name"]), str(len(unit["parameters"])), f"{elements:,}", size(nbytes)])
    return table(["unit", "parameters", "elements", "bytes"], rows)
