"""Makes a :class:`~torch_shard.plan.Plan` from a model: decides which parameters are gathered together.

The automatic plan is made in one walk over the module tree in registration order:

- *Blocks.* Children of one class in a ModuleList, ModuleDict or Sequential repeat. Each is a unit, triggered by itself, whatever
  its size. Blocks are not merged, so that every layer of a stack costs the same and prefetch has computation to overlap with, and
  they are not split. But a block that is a stage (Swin, ResNet: it directly holds most of its bytes as further blocks) is walked
  instead, and so is a block far above the size target that contains a stack.
- *Stacks.* A module with blocks somewhere below is walked. Its direct parameters are a small unit that it triggers itself.
- *Runs.* The modules between blocks are cut into consecutive runs of at most the size target, each triggered by every module in
  it. A run ends at every stack, so that modules before the blocks never share a unit with modules after them. Embeddings and tied
  parameters are not in one run with other layers, because they are used far from where they are registered.
- *Atoms* (attention, RNNs, parametrized modules) are never split.
- *Experts* are in the unit of the module that routes to them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from ..config.checks import chooses
from ..config.offload import offload_of
from ..config.precision import precision_of
from ..errors import ConfigError
from ..utils.patterns import matches
from .module_tree import ModuleTree, Node
from .plan import BufferInfo, Plan, UnitPlan, flat_order

if TYPE_CHECKING:
    from ..config.shard_config import ShardConfig

# A block this many times above the size target is walked if it contains a stack.
_HUGE_BLOCK = 4
# Parameters of which one module holds more than this share gain nothing from being split up.
_DOMINANT = 0.75


def make_plan(model: nn.Module, config: ShardConfig, world_size: int) -> Plan:
    """Decide which parameters of a model are gathered together, and which modules trigger that.

    No data is read, so the model may be on the meta device. Not collective. Ranks with equal models and configs get plans of
    equal :meth:`~torch_shard.plan.Plan.digest`.

    Args:
        model: any module; it is not changed.
        config: the settings; ``units``, ``unit_bytes``, ``ignore``, ``precision``, ``quantized``, ``strategy``,
            ``prefetch`` and ``offload`` are used.
        world_size: the number of ranks that share the parameters.

    Returns:
        A plan in which every parameter object is in exactly one unit or ignored.

    Raises:
        ConfigError: a pattern, class, callable or name in ``units`` or ``ignore`` that matches
            nothing in the model, or a parameter in two groups.
        SetupError: a lazy parameter without a shape.
    """
    tree = ModuleTree(model, precision_of(config.precision), config.quantized, world_size)
    ignored = _ignored(tree, config.ignore)
    planner = _Planner(tree, config.unit_bytes, ignored)
    planner.place_user_units(config.units)
    planner.walk(tree.root)
    planner.flush()
    return Plan(
        units=planner.finished(),
        world_size=world_size,
        ignored=tuple(tree.infos[number].name for number in sorted(ignored)),
        buffers=tuple(BufferInfo(name, tuple(b.shape), b.dtype) for name, b in model.named_buffers()),
        strategy=config.strategy,
        prefetch=config.prefetch,
        offload=offload_of(config.offload),
    )


def _ignored(tree: ModuleTree, entries: Sequence[nn.Module | nn.Parameter | str]) -> set[int]:
    ignored: set[int] = set()
    by_name = tree.by_name()
    for index, entry in enumerate(entries):
        if isinstance(entry, nn.Module):
            if tree.node_of(entry) is None:
                raise ConfigError(f"ignore[{index}] is a {type(entry).__name__} that the model does not contain.")
            found = {tree.number_of(param) for param in entry.parameters()}
        elif isinstance(entry, str):
            found = {number for name, number in by_name.items() if matches(name, entry)}
            if not found:
                raise ConfigError(f"ignore[{index}] matches no parameter name: {entry!r}.{_hint(entry, by_name)}")
        else:
            found = {tree.number_of(entry)}
            if None in found:
                raise ConfigError(
                    f"ignore[{index}] is a parameter of shape {tuple(entry.shape)} that the model does not contain."
                )
        ignored.update(number for number in found if number is not None)
    return ignored


def _hint(name: str, known: dict[str, int]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f" Close to it: {', '.join(map(repr, close))}." if close else ""


class _Planner:
    """The state of one walk: the parameters that are in a unit, and the run that is being filled."""

    def __init__(self, tree: ModuleTree, unit_bytes: int, ignored: set[int]):
        self.tree = tree
        self.unit_bytes = unit_bytes
        self.placed = set(ignored)
        self.units: list[tuple[tuple[int, int], UnitPlan]] = []
        self.user_units: set[Node] = set()
        self.run: list[Node] = []
        self.run_bytes = 0
        self.run_kind = ""
        self._stacked: dict[Node, bool] = {}

    # ---- what the walk produces

    def finished(self) -> tuple[UnitPlan, ...]:
        """Return all units in registration order; a unit of a module comes before units of modules inside.

        Reductions go through the plan backwards, and the gradients of an enclosing module's own parameters may be complete only
        when those of all modules inside are.
        """
        return tuple(unit for _, unit in sorted(self.units, key=lambda pair: pair[0]))

    def add_unit(self, name: str, numbers: Sequence[int], roots: Sequence[Node] = ()) -> None:
        """Make a unit of those parameters that are in none yet; `roots` are its modules."""
        numbers = sorted(number for number in numbers if number not in self.placed)
        if not numbers:
            return
        self.placed.update(numbers)
        params = flat_order(self.tree.infos[number] for number in numbers)
        unit = UnitPlan(name, params, self.tree.triggers(numbers, roots))
        first = roots[0] if roots else None
        place = (first.numbers[0], len(first.name)) if first else (numbers[0], 0)  # names of inner modules are longer
        self.units.append((place, unit))

    def left_in(self, node: Node) -> list[int]:
        """Return the parameters below a node that are in no unit yet."""
        return [number for number in node.numbers if number not in self.placed]

    def nbytes(self, numbers: Sequence[int]) -> int:
        """Return the bytes of parameters while they are gathered."""
        return sum(self.tree.infos[number].gathered_nbytes for number in numbers)

    # ---- units chosen by the user

    def place_user_units(self, units: object) -> None:
        """Make the user's units, around which the walk plans."""
        if units is None:
            return
        if callable(units):
            self._place_modules([n for n in self.tree.root.walk() if units(n.name, n.module)])
            return
        assert isinstance(units, (tuple, list))  # ShardConfig has checked it
        if all(isinstance(entry, (str, type)) for entry in units):
            chosen: dict[Node, None] = {}
            for index, entry in enumerate(units):
                matched = [n for n in self.tree.root.walk() if chooses(entry, n.name, n.module)]
                if not matched:
                    text = repr(entry) if isinstance(entry, str) else entry.__name__
                    what = "module name" if isinstance(entry, str) else "module of that class"
                    names = {n.name: 0 for n in self.tree.root.walk()}
                    hint = _hint(entry, names) if isinstance(entry, str) else ""
                    raise ConfigError(f"units[{index}] matches no {what}: {text}.{hint}")
                chosen.update(dict.fromkeys(matched))
            self._place_modules([n for n in self.tree.root.walk() if n in chosen])
        else:
            self._place_groups(units)

    def _place_modules(self, nodes: Sequence[Node]) -> None:
        if not any(node.numbers for node in nodes):
            raise ConfigError(
                "units chooses no module with parameters"
                + (f": {', '.join(repr(n.name) for n in nodes[:5])} have none." if nodes else ".")
            )
        self.user_units.update(nodes)
        # Parents come first in the walk. In reverse order, an inner unit takes its parameters before an outer one.
        for node in reversed(nodes):
            callers = [node] if node.has_forward else list(self._callable_children(node))
            self.add_unit(node.name or "(root)", node.numbers, callers)

    def _callable_children(self, node: Node) -> Iterator[Node]:
        """Yield the topmost modules with a forward below a node that has none."""
        for child in node.children:
            if child.has_forward:
                if child.numbers:
                    yield child
            else:
                yield from self._callable_children(child)

    def _place_groups(self, groups: Sequence[Sequence[str]]) -> None:
        by_name = self.tree.by_name()
        group_of: dict[int, int] = {}
        for index, group in enumerate(groups):
            for name in group:
                if name not in by_name:
                    raise ConfigError(f"units[{index}] names an unknown parameter: {name!r}.{_hint(name, by_name)}")
                number = by_name[name]
                if number in self.placed:
                    raise ConfigError(f"units[{index}] names an ignored parameter: {name!r}.")
                first = group_of.setdefault(number, index)
                if first != index:
                    raise ConfigError(
                        f"Parameter {self.tree.infos[number].name!r} is in two groups, "
                        f"units[{first}] and units[{index}] (there as {name!r})."
                    )
        for index, group in enumerate(groups):
            self.add_unit(f"group {index}", [by_name[name] for name in group])

    # ---- the automatic walk

    def walk(self, node: Node, *, stage: bool = False) -> None:
        """Plan the children of a module one by one; its direct parameters are a unit.

        Args:
            node: the module.
            stage: True if it is, or is in, a stage of a stack. Children that repeat are then blocks, never stages.
        """
        self.flush()
        self.add_unit(node.name or "(root)", list(self._direct(node)), [node])
        for child, kind in self._members(node):
            if kind == "border":
                self.flush()
            elif kind == "block":
                self.place_block(child, in_stage=stage)
            else:
                self.place_item(child, kind, in_stage=stage)
        # No flush: a final norm may share a unit with the head that its parent calls next.

    def _direct(self, node: Node) -> Iterator[int]:
        """Yield the parameters that only this module's own forward can use, those of its lists included."""
        yield from node.own
        for child in node.children:
            if child.is_expert_list:
                yield from child.numbers
            elif not child.has_forward:
                yield from self._direct(child)

    def _members(self, node: Node) -> Iterator[tuple[Node, str]]:
        """Yield the modules that a node's forward may call, with their roles; lists are replaced by their entries.

        The role ``border`` only says that no run crosses here.
        """
        blocks = _blocks(node)
        for child in node.children:
            if child.is_expert_list:
                continue
            if child in self.user_units:
                yield child, "border"  # all of its parameters are in the user's unit
            elif not child.has_forward and not child.is_atom:
                border = child in blocks or self._has_stack(child)
                if border:
                    yield child, "border"
                yield from self._members(child)
                if border:
                    yield child, "border"
            elif child in blocks:
                yield child, "block"
            # A list of one layer, or of layers of different classes, is a stack by intention.
            elif child.is_composite and node.is_container and not node.has_forward:
                yield child, "alone"
            else:
                yield child, self._role(child)

    def _role(self, node: Node) -> str:
        left = self.left_in(node)
        if any(len(self.tree.infos[number].owners) > 1 for number in left):  # tied
            return "alone"
        return "embedding" if _holds_embedding(node) else "layer"

    def place_block(self, node: Node, *, in_stage: bool) -> None:
        """Make a repeated module one unit, unless it is a stage that holds the real blocks.

        Stages do not nest: a bottleneck of a ResNet, inside a stage, is a block although it holds a row of like convolution
        layers itself.
        """
        self.flush()
        is_stage = not in_stage and _is_stage(node)
        huge = node.nbytes > _HUGE_BLOCK * self.unit_bytes and any(map(_stage_blocks, node.walk()))
        chosen_inside = any(n in self.user_units for n in node.walk())
        if not node.is_atom and (is_stage or huge) and not chosen_inside:
            self.walk(node, stage=True)
        else:
            self.add_unit(node.name, node.numbers, [node])

    def place_item(self, node: Node, kind: str, *, in_stage: bool) -> None:
        """Append a module between blocks to the current run, or walk it if it holds a stack or too much."""
        left = self.left_in(node)
        if not left:
            return
        if not node.is_atom and self._must_walk(node, left):
            self.walk(node, stage=in_stage)
            return
        size = self.nbytes(left)
        too_much = self.run_bytes + size > self.unit_bytes
        if self.run and (too_much or kind == "alone" or kind != self.run_kind):
            self.flush()
        self.run.append(node)
        self.run_bytes += size
        self.run_kind = kind

    def _must_walk(self, node: Node, left: Sequence[int]) -> bool:
        if not node.is_composite:
            return False
        if self._has_stack(node) or any(n in self.user_units for n in node.walk()):
            return True
        if _is_small_language_model(node):
            return True
        size = self.nbytes(left)
        largest = max(self.nbytes(n.own) for n in node.walk())
        return size > self.unit_bytes and largest <= _DOMINANT * size

    def _has_stack(self, node: Node) -> bool:
        """Return True if blocks repeat somewhere in this module, outside of atoms and experts."""
        if node not in self._stacked:
            self._stacked[node] = bool(_blocks(node)) or any(
                self._has_stack(child) for child in node.children if not child.is_atom and not child.is_expert_list
            )
        return self._stacked[node]

    def flush(self) -> None:
        """Make a unit of the current run, and begin another."""
        if self.run:
            first, last = self.run[0].name, self.run[-1].name
            name = first if len(self.run) == 1 else f"{first}..{last}"
            self.add_unit(name, [number for node in self.run for number in node.numbers], self.run)
        self.run, self.run_bytes, self.run_kind = [], 0, ""


def _blocks(container: Node) -> set[Node]:
    """Return the children of a container that repeat; none if it is no stack.

    These are all children if they are of one class, plain layers included. Else, if at least two children with children of their
    own are of one class, these are all children that have children: stacks mix classes (a dense first layer among sparse ones),
    and a Sequential of convolutions and activations is no stack.
    """
    if not container.is_container or container.is_expert_list:
        return set()
    holders = [child for child in container.children if child.numbers]
    if len(holders) < 2:
        return set()
    if len({child.kind for child in container.children}) == 1:
        return set(holders)
    composite = [child for child in holders if child.is_composite]
    kinds = [child.kind for child in composite]
    return set(composite) if len(set(kinds)) < len(kinds) else set()


def _is_stage(node: Node) -> bool:
    """Return True if a block is a stage: it, or a list in it, holds blocks that are most of its bytes."""
    return any(
        2 * sum(block.nbytes for block in _stage_blocks(container)) >= node.nbytes > 0
        for container in (node, *node.children)
    )


def _stage_blocks(container: Node) -> set[Node]:
    """Return what :func:`_blocks` returns, for a container inside a block, if all of them have two weight matrices or more.

    A convolution with its norm is a layer, and a row of these is one block.
    """
    blocks = _blocks(container)
    return blocks if all(_matrices(block) >= 2 for block in blocks) else set()


def _matrices(node: Node) -> int:
    return sum(param is not None and param.ndim >= 2 for n in node.walk() for param in n.module._parameters.values())


def _holds_embedding(node: Node) -> bool:
    return any(isinstance(n.module, (nn.Embedding, nn.EmbeddingBag)) for n in node.walk())


def _is_small_language_model(node: Node) -> bool:
    """Return True if a module that would fit one unit has both an embedding and layers that follow it.

    These must not share a unit. A group of embeddings with a norm, or with a projection of patches, is one step of the forward
    and is not split.
    """
    if "embed" in node.attr.lower() or "embed" in node.kind.__name__.lower():
        return False
    if not _holds_embedding(node):
        return False
    return any(
        isinstance(n.module, (nn.Linear, nn.RNNBase, nn.MultiheadAttention, nn.Conv1d, nn.Conv2d))
        for n in node.walk()
        if n.own
    )
