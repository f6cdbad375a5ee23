"""Write docs/reference from the docstrings of the public interface.

    python docs/make_reference.py [--check]

Reads the sources with :mod:`ast` and imports nothing of them, so it needs neither torch nor Lightning and its output
depends on no version of theirs. With ``--check`` nothing is written; the exit status is 1 where a page is out of date.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"

Documented = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Entry:
    """One documented object.

    Attributes:
        path: source file, relative to the repository.
        name: of the class or function in that file.
        title: as users write it.
        members: of a class, in the order of the page; None for all public ones.
        constructor: whether users build the class themselves, so that its arguments are shown.
        bases: of a class, those whose members are shown behind its own: source file and name of each.
    """

    path: str
    name: str
    title: str
    members: tuple[str, ...] | None = None
    constructor: bool = False
    bases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Page:
    """One file of the reference."""

    file: str
    title: str
    intro: str
    entries: tuple[Entry, ...]


def _errors() -> tuple[Entry, ...]:
    path = "core/torch_shard/errors.py"
    names = [n.name for n in _parse(path).body if isinstance(n, ast.ClassDef)]
    return tuple(Entry(path, name, f"torch_shard.errors.{name}") for name in names)


def pages() -> tuple[Page, ...]:
    """All pages, in the order of the index."""
    core = "core/torch_shard"
    return (
        Page(
            "engine.md",
            "shard and Engine",
            "`torch_shard.shard` shards a model in place and returns its `Engine`. *Collective* means: every rank of "
            "the mesh must make the call, in the same order. What is not called collective needs no other rank.",
            (
                Entry(f"{core}/engine.py", "shard", "torch_shard.shard"),
                Entry(f"{core}/engine.py", "engine_of", "torch_shard.engine_of"),
                Entry(f"{core}/deferred_init.py", "from_files", "torch_shard.from_files"),
                Entry(f"{core}/engine.py", "Engine", "torch_shard.Engine"),
                Entry(f"{core}/comm/traffic_statistics.py", "Statistics", "torch_shard.Statistics"),
            ),
        ),
        Page(
            "config.md",
            "ShardConfig",
            "Every choice. `shard(model, ShardConfig(prefetch=2))` and `shard(model, prefetch=2)` are the same.",
            (Entry(f"{core}/config/shard_config.py", "ShardConfig", "torch_shard.ShardConfig", constructor=True),),
        ),
        Page(
            "precision.md",
            "Precision",
            "`ShardConfig.precision`: in which dtypes parameters are kept, computed with and reduced. "
            "[Mixed precision](../precision.md) shows it in use.",
            (
                Entry(
                    f"{core}/config/precision.py", "Precision", "torch_shard.Precision", members=(), constructor=True
                ),
                Entry(f"{core}/config/precision.py", "norms_in", "torch_shard.norms_in"),
            ),
        ),
        Page(
            "quantized.md",
            "Quantized",
            "`ShardConfig.quantized`: what is sent as 8-bit codes. [Quantized communication](../quantized.md) says what it costs "
            "and what it saves.",
            (
                Entry(
                    f"{core}/config/quantization.py", "Quantized", "torch_shard.Quantized", members=(), constructor=True
                ),
            ),
        ),
        Page(
            "offload.md",
            "Offload",
            "`ShardConfig.offload`: what lies in host memory. [Offload](../offload.md) says what moves when, and what it costs.",
            (Entry(f"{core}/config/offload.py", "Offload", "torch_shard.Offload", members=(), constructor=True),),
        ),
        Page(
            "plan.md",
            "Plan",
            "Which parameters travel together. `engine.plan` is the plan in use; `make_plan` makes one without "
            "sharding, on the meta device too, to look at what a setting would do.",
            (
                Entry(f"{core}/plan/planner.py", "make_plan", "torch_shard.make_plan"),
                Entry(f"{core}/plan/plan.py", "Plan", "torch_shard.Plan"),
                Entry(f"{core}/plan/plan.py", "UnitPlan", "torch_shard.plan.UnitPlan"),
                Entry(f"{core}/plan/plan.py", "ParamInfo", "torch_shard.plan.ParamInfo"),
                Entry(f"{core}/plan/plan.py", "BufferInfo", "torch_shard.plan.BufferInfo"),
                Entry(f"{core}/plan/memory_estimate.py", "PredictedBytes", "torch_shard.plan.PredictedBytes"),
                Entry(f"{core}/plan/settings_search.py", "search", "torch_shard.plan.search"),
                Entry(f"{core}/plan/search_results.py", "Search", "torch_shard.plan.Search"),
                Entry(f"{core}/plan/search_results.py", "Estimate", "torch_shard.plan.Estimate"),
                Entry(f"{core}/plan/search_results.py", "Candidate", "torch_shard.plan.Candidate"),
            ),
        ),
        Page(
            "shard_tensor.md",
            "ShardTensor",
            "What parameters, their gradients and their optimizer state are between steps. Users do not make them.",
            (Entry(f"{core}/shard_tensor/tensor.py", "ShardTensor", "torch_shard.ShardTensor"),),
        ),
        Page(
            "activations.md",
            "Activations",
            "Layers that compute their activations again in backward, and whose inputs wait for it in host memory. "
            "[Activation offload](../activation_offload.md) says what moves when.",
            (
                Entry(
                    f"{core}/activation_checkpointing.py",
                    "checkpointed_layers",
                    "torch_shard.activation_checkpointing.checkpointed_layers",
                ),
                Entry(
                    f"{core}/activation_checkpointing.py",
                    "keep_activations",
                    "torch_shard.activation_checkpointing.keep_activations",
                ),
                Entry(
                    f"{core}/activation_checkpointing.py",
                    "offload_of",
                    "torch_shard.activation_checkpointing.offload_of",
                ),
                Entry(
                    f"{core}/activation_offload.py",
                    "ActivationOffload",
                    "torch_shard.activation_offload.ActivationOffload",
                    constructor=True,
                ),
            ),
        ),
        Page(
            "optim.md",
            "Optimizers",
            "How an optimizer steps on a sharded model depends on its kind. `torch.optim`'s own classes have theirs; others are "
            "declared. [Design](../design.md#optimizer-steps) says what happens in a step.",
            (
                Entry(f"{core}/optim/registry.py", "register", "torch_shard.optim.register"),
                Entry(f"{core}/optim/registry.py", "kind_of", "torch_shard.optim.kind_of"),
            ),
        ),
        Page(
            "optim_state.md",
            "Optimizer state",
            "`torch_shard.optim_state`: optimizer state in other forms, under the names that torch's FullyShardedDataParallel "
            "gives its functions.",
            tuple(
                Entry(f"{core}/optim_state.py", name, f"torch_shard.optim_state.{name}")
                for name in (
                    "full_optim_state_dict",
                    "sharded_optim_state_dict",
                    "optim_state_dict",
                    "optim_state_dict_to_load",
                    "shard_full_optim_state_dict",
                    "flatten_sharded_optim_state_dict",
                    "scatter_full_optim_state_dict",
                    "rekey_optim_state_dict",
                )
            ),
        ),
        Page(
            "state_dict_type.md",
            "The model's own state dict",
            "`torch_shard.state_dict_type`: what `model.state_dict()` gives, for code written for torch's "
            "FullyShardedDataParallel.",
            tuple(
                Entry(f"{core}/state_dict_type.py", name, f"torch_shard.state_dict_type.{name}")
                for name in ("set_state_dict_type", "get_state_dict_type", "state_dict_type")
            ),
        ),
        Page(
            "fsdp.md",
            "torch_shard.fsdp",
            "The interfaces of torch's FSDP. [Code written for torch's FSDP](../fsdp.md) says what each argument means here.",
            (
                Entry(
                    f"{core}/fsdp/fully_sharded_data_parallel.py",
                    "FullyShardedDataParallel",
                    "torch_shard.fsdp.FullyShardedDataParallel",
                    bases=((f"{core}/fsdp/module_mixin.py", "WrappedModule"),),
                    constructor=True,
                ),
                Entry(f"{core}/fsdp/_fully_shard.py", "fully_shard", "torch_shard.fsdp.fully_shard"),
                Entry(
                    f"{core}/fsdp/_fully_shard.py",
                    "FSDPModule",
                    "torch_shard.fsdp.FSDPModule",
                    bases=((f"{core}/fsdp/module_mixin.py", "WrappedModule"),),
                ),
                Entry(f"{core}/fsdp/_fully_shard.py", "UnshardHandle", "torch_shard.fsdp.UnshardHandle"),
                Entry(
                    f"{core}/fsdp/_fully_shard.py",
                    "register_fsdp_forward_method",
                    "torch_shard.fsdp.register_fsdp_forward_method",
                ),
                Entry(f"{core}/fsdp/_fully_shard.py", "share_comm_ctx", "torch_shard.fsdp.share_comm_ctx"),
                Entry(
                    f"{core}/fsdp/sharded_grad_scaler.py",
                    "ShardedGradScaler",
                    "torch_shard.fsdp.sharded_grad_scaler.ShardedGradScaler",
                    members=(),
                    constructor=True,
                ),
            ),
        ),
        Page(
            "errors.md",
            "Errors",
            "Every error of the engine. [Troubleshooting](../troubleshooting.md) shows their messages.",
            _errors(),
        ),
        Page(
            "lightning.md",
            "lightning_shard",
            'The strategy behind `Trainer(strategy="shard")`. Its other methods are those that the Trainer calls.',
            (
                Entry(
                    "lightning_shard/trainer/strategy.py",
                    "TrainerStrategyMixin",
                    "lightning_shard.ShardStrategy",
                    ("engine", "engine_or_none", "config"),
                    constructor=True,
                    bases=(("lightning_shard/strategy/settings.py", "SettingsMixin"),),
                ),
                Entry(
                    "lightning_shard/strategy/settings.py",
                    "StrategySettings",
                    "lightning_shard.strategy.settings.StrategySettings",
                    members=(),
                    constructor=True,
                ),
                Entry(
                    "lightning_shard/monitor/callback.py",
                    "MonitorMixin",
                    "lightning_shard.ShardMonitor",
                    (),
                    constructor=True,
                ),
                Entry(
                    "lightning_shard/fabric/strategy.py",
                    "FabricStrategyMixin",
                    "lightning_shard.ShardFabricStrategy",
                    ("engine_of", "config"),
                    constructor=True,
                    bases=(("lightning_shard/strategy/settings.py", "SettingsMixin"),),
                ),
            ),
        ),
        Page(
            "accelerate.md",
            "accelerate_shard",
            "What differs from Hugging Face Accelerate. Everything else of `Accelerator` and of the Trainer is theirs. See "
            "[Accelerate](../accelerate.md).",
            (
                Entry(
                    "accelerate_shard/accelerator.py",
                    "Accelerator",
                    "accelerate_shard.Accelerator",
                    constructor=True,
                    bases=(("accelerate_shard/state/mixin.py", "StateMixin"),),
                ),
                Entry(
                    "accelerate_shard/settings/plugin.py",
                    "ShardPlugin",
                    "accelerate_shard.ShardPlugin",
                    constructor=True,
                ),
                Entry(
                    "accelerate_shard/trainer/mixin.py", "ShardTrainerMixin", "accelerate_shard.ShardTrainerMixin", ()
                ),
                Entry("accelerate_shard/launch/enable.py", "enable", "accelerate_shard.enable"),
                Entry("accelerate_shard/launch/enable.py", "disable", "accelerate_shard.disable"),
                Entry(
                    "accelerate_shard/models/from_pretrained.py", "from_pretrained", "accelerate_shard.from_pretrained"
                ),
            ),
        ),
    )


# -- reading ----------------------------------------------------------------------------------------------------------


def _parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def find(entry: Entry) -> Documented:
    """The definition of an entry.

    Raises:
        LookupError: it is not in its file any more.
    """
    for node in _parse(entry.path).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == entry.name:
            return node
    raise LookupError(f"{entry.path} has no {entry.name}")


def members(entry: Entry, node: ast.ClassDef) -> list[ast.FunctionDef]:
    """The documented methods and properties of a class; of a property only the getter."""
    found: dict[str, ast.FunctionDef] = {}
    for each in (node, *(find(Entry(path, name, name)) for path, name in entry.bases)):
        for child in each.body:
            if isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
                found.setdefault(child.name, child)
    if entry.members is None:
        return list(found.values())
    missing = [name for name in entry.members if name not in found]
    if missing:
        raise LookupError(f"{entry.path}: {entry.name} has no {missing[0]}")
    return [found[name] for name in entry.members]


def undocumented() -> list[str]:
    """Public names of the reference that have no docstring."""
    bare = []
    for page in pages():
        for entry in page.entries:
            node = find(entry)
            if not ast.get_docstring(node):
                bare.append(entry.title)
            if isinstance(node, ast.ClassDef):
                bare += [f"{entry.title}.{m.name}" for m in members(entry, node) if not ast.get_docstring(m)]
    return bare


def _decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(d) for d in node.decorator_list}


def signature(name: str, node: ast.FunctionDef, *, skip_first: bool, returns: bool = True) -> str:
    """`name(arguments) -> result`, one argument a line where it would be long."""
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(a.defaults)), *a.defaults]
    parts = [_argument(arg, default) for arg, default in zip(plain, defaults, strict=True)][1 if skip_first else 0 :]
    if a.vararg:
        parts.append("*" + _argument(a.vararg, None))
    elif a.kwonlyargs:
        parts.append("*")
    parts += [_argument(arg, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg:
        parts.append("**" + _argument(a.kwarg, None))
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None and returns else ""
    return _call(name, parts, result)


def _call(name: str, parts: list[str], result: str) -> str:
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    text = arg.arg + (f": {ast.unparse(arg.annotation)}" if arg.annotation is not None else "")
    if default is None:
        return text
    return f"{text} = {ast.unparse(default)}" if arg.annotation is not None else f"{text}={ast.unparse(default)}"


def _constructor(title: str, node: ast.ClassDef) -> str:
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            return signature(title, child, skip_first=True, returns=False)
    fields = [child for child in node.body if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)]
    parts = [ast.unparse(child) for child in fields]  # a dataclass
    return _call(title, parts, "")


# -- docstrings to Markdown -------------------------------------------------------------------------------------------

_SECTIONS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Raises": "Raises",
    "Returns": "Returns",
    "Yields": "Yields",
}
_ROLE = re.compile(r":(?:py:)?(?:class|meth|func|attr|data|mod|exc):`(~?)\.?([^`]+)`")


def _inline(text: str) -> str:
    # :class:`~a.b.C` is `C`; ``x`` is `x`.
    text = _ROLE.sub(lambda m: f"`{m[2].rsplit('.', 1)[-1] if m[1] else m[2]}`", text)
    return text.replace("``", "`")


def markdown(docstring: str) -> str:
    """A docstring (Google's sections, reStructuredText inline) as Markdown."""
    lines = inspect.cleandoc(docstring).splitlines()
    out: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.endswith(":") and line[:-1] in _SECTIONS:
            body, at = _indented(lines, at + 1)
            out += ["", f"**{_SECTIONS[line[:-1]]}**", "", *_items(body), ""]
        elif line.rstrip().endswith("::"):
            body, at = _indented(lines, at + 1)
            # "Example::" keeps its colon, a lone "::" goes.
            out += [_inline(line.rstrip()[:-1]), "", "```", *body, "```", ""]
        else:
            label = re.match(r"(Raised|Remedy): ", line)
            out += ["", f"**{label[1]}:** {_inline(line[label.end() :])}"] if label else [_inline(line)]
            at += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def _indented(lines: list[str], at: int) -> tuple[list[str], int]:
    body = []
    while at < len(lines) and (not lines[at].strip() or lines[at].startswith(" ")):
        body.append(lines[at])
        at += 1
    return inspect.cleandoc("\n" + "\n".join(body)).splitlines(), at


def _items(body: list[str]) -> Iterator[str]:
    """`name: text` with its continuation lines, as a list; running text as it is."""
    for line in body:
        item = re.match(r"([\w*][\w., *`()]*): (.*)", line)
        if item and not line.startswith(" "):
            names = ", ".join(f"`{name.strip()}`" for name in item[1].split(","))
            yield f"- {names}: {_inline(item[2])}"
        else:
            yield f"  {_inline(line.strip())}" if line.startswith(" ") else _inline(line)


# -- writing ----------------------------------------------------------------------------------------------------------


def render(page: Page) -> str:
    """The whole text of one page."""
    out = ["<!-- Written by docs/make_reference.py from the docstrings; edit those, then run `make docs`. -->"]
    out += [f"# {page.title}", page.intro]
    for entry in page.entries:
        node = find(entry)
        out.append(f"## {entry.title}")
        doc = markdown(ast.get_docstring(node) or "")
        if isinstance(node, ast.FunctionDef):
            out += [_code(signature(entry.title, node, skip_first=False)), doc]
            continue
        if entry.constructor:
            out.append(_code(_constructor(entry.title, node)))
        elif page.file == "errors.md":
            out.append("Bases: " + ", ".join(f"`{ast.unparse(base)}`" for base in node.bases))
        out.append(doc)
        for member in members(entry, node):
            out += _member(member)
    return "\n\n".join(part for part in out if part) + "\n"


def _member(node: ast.FunctionDef) -> list[str]:
    doc = markdown(ast.get_docstring(node) or "")
    decorators = _decorators(node)
    if decorators & {"property", "functools.cached_property"}:
        kind = f": {ast.unparse(node.returns)}" if node.returns is not None else ""
        return [f"### {node.name}", _code(f"{node.name}{kind}  (property)"), doc]
    static = "staticmethod" in decorators
    text = signature(node.name, node, skip_first=not static)
    if any("contextmanager" in d for d in decorators):
        text = f"with {signature(node.name, node, skip_first=not static, returns=False)}:"
    return [f"### {node.name}", _code(text), doc]


def _code(text: str) -> str:
    # Not "python": formatters of Markdown would rewrite it, and the page would differ from what is written here.
    return f"```text\n{text}\n```"


def render_index() -> str:
    """The table of contents."""
    out = ["<!-- Written by docs/make_reference.py. -->", "# Reference"]
    for page in pages():
        names = ", ".join(f"`{entry.title}`" for entry in page.entries)
        out.append(f"- [{page.title}]({page.file}): {names}")
    return "\n\n".join(out[:2]) + "\n\n" + "\n".join(out[2:]) + "\n"


def reference() -> dict[Path, str]:
    """Every file of docs/reference and what it should hold."""
    return {FOLDER / "README.md": render_index(), **{FOLDER / page.file: render(page) for page in pages()}}


def out_of_date() -> list[str]:
    """Names of files that differ from what the sources give, those that should not be there included."""
    wanted = reference()
    stale = [p.name for p, text in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    return stale + [p.name for p in sorted(FOLDER.glob("*.md")) if p not in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is out of date")
    if parser.parse_args().check:
        stale = out_of_date()
        if stale:
            print(f"docs/reference is out of date: {', '.join(stale)}. Run `make docs`.")
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = reference()
    for path in FOLDER.glob("*.md"):
        if path not in wanted:
            path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    print(f"wrote {len(wanted)} files to {FOLDER.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
