"""An index of a model's modules and parameters, for planning. It reads metadata, never values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ..config.precision import NONE, Precision
from ..config.quantization import Quantized
from ..errors import ConfigError, SetupError
from ..utils.patterns import every_name
from .plan import ParamInfo

# The forward of these modules, or a fused fast path, uses the parameters of their children directly, so that the children's own
# forwards don't run.
_ATOM_TYPES = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_CONTAINER_TYPES = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

_Found = TypeVar("_Found")


class Node:
    """One module object, at the place of its first registration."""

    __slots__ = ("attr", "children", "module", "name", "nbytes", "numbers", "own", "parent")

    def __init__(self, module: nn.Module, name: str, parent: Node | None):
        self.module = module
        self.name = name
        self.parent = parent
        self.attr = name.rpartition(".")[2]
        self.children: list[Node] = []
        self.own: list[int] = []  # numbers of the parameters that are first registered directly here
        self.numbers: list[int] = []  # numbers of the parameters of the whole subtree
        self.nbytes = 0  # bytes of the whole subtree while it is gathered

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it, parents first, in registration order."""
        pending = [self]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(reversed(node.children))

    @property
    def has_forward(self) -> bool:
        """True if the module can be called; lists and dicts have no forward."""
        # A wrapper may have assigned an attribute `forward` to the instance.
        return "forward" in self.module.__dict__ or type(self.module).forward is not nn.Module.forward

    @property
    def kind(self) -> type:
        """The class of the module, or the class that it had before ``parametrize`` generated another."""
        return parametrize.type_before_parametrizations(self.module)

    @property
    def is_container(self) -> bool:
        """True if the module is a ModuleList, ModuleDict or Sequential."""
        return isinstance(self.module, _CONTAINER_TYPES)

    @property
    def is_composite(self) -> bool:
        """True if some of its parameters belong to its children."""
        return any(child.numbers for child in self.children)

    @property
    def is_atom(self) -> bool:
        """True if it must be gathered as a whole because its forward uses parameters of its children.

        A module with the old ``weight_norm`` or ``spectral_norm`` is one, too, although these keep their parameters in the
        module itself.
        """
        module = self.module
        return (
            isinstance(module, _ATOM_TYPES)
            or parametrize.is_parametrized(module)
            or any(type(hook).__module__.startswith("torch.nn.utils.") for hook in module._forward_pre_hooks.values())
        )

    @property
    def is_expert_list(self) -> bool:
        """True if it is a list of experts. Which of them run depends on the data.

        The ranks would gather different units, so experts are in the unit of the module that routes.
        """
        return self.is_container and not self.has_forward and "expert" in self.attr.lower()


class ModuleTree:
    """A spanning tree of the modules of a model, and its parameters, each object once.

    Raises:
        SetupError: for a lazy parameter without a shape yet.
    """

    def __init__(
        self, model: nn.Module, precision: Precision = NONE, quantized: Quantized | None = None, world_size: int = 1
    ):
        kept = precision.kept_modules(model)
        exact = set() if quantized is None else quantized.kept_modules(model)
        self.params: list[nn.Parameter] = []
        self.infos: list[ParamInfo] = []
        self._number: dict[int, int] = {}
        self._node: dict[int, Node] = {}
        self._holders: dict[Node, list[Node]] = {}  # the modules that each one is registered in
        self.root = self._grow(model, "", None)
        names: list[list[str]] = [[] for _ in self.params]
        # The modules that each parameter is registered in, with the attribute.
        self._owners: list[dict[tuple[Node, str], None]] = [{} for _ in self.params]
        for prefix, module in every_name(model):
            node = self._node[id(module)]
            for attr, param in module._parameters.items():
                if param is None:
                    continue
                number = self._number[id(param)]
                names[number].append(f"{prefix}.{attr}" if prefix else attr)
                self._owners[number][node, attr] = None

        def within(found: tuple[bool, bool], node: Node) -> tuple[bool, bool]:
            return found[0] or node.module in kept, found[1] or node.module in exact

        known: dict[Node, list[tuple[bool, bool]]] = {}
        for number, param in enumerate(self.params):
            if is_lazy(param):
                raise SetupError(
                    f"Parameter {names[number][0]!r} has no shape yet (a lazy module): run one forward before sharding."
                )
            ways = [(n, way) for n, _ in self._owners[number] for way in self._ways(n, (False, False), within, known)]
            inside = [is_kept for _, (is_kept, _) in ways]
            if any(inside) and not all(inside) and precision.param_dtype is not None and precision.cast_inputs:
                here, there = (ways[inside.index(value)][0].name for value in (True, False))
                raise ConfigError(
                    f"precision.keep: {names[number][0]} is tied between {here!r}, which is kept, and {there!r}, which is not, "
                    "and a parameter has one dtype. Keep both or none, or cast inputs by autocast (cast_inputs=False)."
                )
            holders = [(node.module, attr) for node, attr in self._owners[number]]
            keep = any(inside) or precision.keeps(holders, param)
            dtypes = precision.dtypes(param.dtype, param.requires_grad, keep)
            if quantized is not None and world_size > 1:  # else nothing is sent
                is_exact = any(is_exact for _, (_, is_exact) in ways)
                dtypes = quantized.of(dtypes, param.shape, param.requires_grad, is_exact)
            placed, cut_into = _placed(param)
            self.infos.append(
                ParamInfo(
                    name=names[number][0],
                    owners=tuple((node.name, attr) for node, attr in self._owners[number]),
                    shape=tuple(param.shape),
                    stride=tuple(param.stride()),
                    dtype=param.dtype,
                    requires_grad=param.requires_grad,
                    aliases=tuple(names[number][1:]),
                    dtypes=dtypes,
                    placed=placed,
                    ways=cut_into,
                )
            )
        self._sum_up()

    def _grow(self, module: nn.Module, name: str, parent: Node | None) -> Node:
        node = self._node[id(module)] = Node(module, name, parent)
        for param in module._parameters.values():
            if param is not None and id(param) not in self._number:
                self._number[id(param)] = len(self.params)
                node.own.append(len(self.params))
                self.params.append(param)
        for attr, child in module._modules.items():
            if child is not None and id(child) not in self._node:
                child_name = f"{name}.{attr}" if name else attr
                node.children.append(self._grow(child, child_name, node))
            if child is not None:
                self._holders.setdefault(self._node[id(child)], []).append(node)
        return node

    def _ways(
        self, node: Node, begin: _Found, step: Callable[[_Found, Node], _Found | None], known: dict[Node, list[_Found]]
    ) -> list[_Found]:
        """Return what `step` finds on the ways of registrations from the root to `node`, each result once.

        A module that is registered in many places may have more ways than can be counted. So ways with equal results at a
        module are one from there on.

        Args:
            node: the end of the ways.
            begin: the result before the root.
            step: returns the result at a node from the result above it; None if that way is of no interest.
            known: the results of earlier calls with the same `begin` and `step`.
        """
        if node not in known:
            known[node] = []
            above = [self._ways(holder, begin, step, known) for holder in self._holders.get(node, ())]
            before = [begin] if node is self.root else itertools.chain(*above)
            results = dict.fromkeys(step(result, node) for result in before)
            known[node] = [result for result in results if result is not None]
        return known[node]

    def _sum_up(self) -> None:
        for node in reversed(list(self.root.walk())):
            node.numbers = list(node.own)
            for child in node.children:
                node.numbers.extend(child.numbers)
            node.nbytes = sum(self.infos[number].gathered_nbytes for number in node.own)
            node.nbytes += sum(child.nbytes for child in node.children)

    def node_of(self, module: nn.Module) -> Node | None:
        """Return the node of a module, or None if the model does not hold it."""
        return self._node.get(id(module))

    def number_of(self, param: torch.Tensor) -> int | None:
        """Return the number of a parameter, or None if the model does not hold it."""
        return self._number.get(id(param))

    def by_name(self) -> dict[str, int]:
        """Return the numbers of parameters by full name, with all names of tied parameters."""
        return {name: number for number, info in enumerate(self.infos) for name in (info.name, *info.aliases)}

    def triggers(self, numbers: Iterable[int], roots: Iterable[Node]) -> tuple[str, ...]:
        """Return the names of the modules whose forward needs these parameters.

        Args:
            numbers: the unit's parameters.
            roots: modules that trigger the unit as wholes, so that modules below them need not.
        """
        covering = {self._first_way(root)[0].name: root for root in roots}
        found = dict.fromkeys(covering)
        nodes = set(covering.values())

        def called(before: tuple[Node, bool], node: Node) -> tuple[Node, bool] | None:
            return None if node in nodes else _called(before, node)

        known: dict[Node, list[tuple[Node, bool]]] = {}
        for number in numbers:
            for owner, _ in self._owners[number]:
                ways = self._ways(owner, (self.root, False), called, known)
                found.update(dict.fromkeys(caller.name for caller, _ in ways))
        return tuple(found)

    def _first_way(self, node: Node | None) -> tuple[Node, bool]:
        """Return what :func:`_called` finds at a node on the way of first registrations; that before the root for None."""
        return (self.root, False) if node is None else _called(self._first_way(node.parent), node)


def _called(before: tuple[Node, bool], node: Node) -> tuple[Node, bool]:
    """Return the module on a way whose forward first uses the parameters in `node`, and whether it is an atom.

    That is the outermost atom, else the innermost module that has a forward, else the root. `before` is the result for the node
    above.
    """
    if before[1]:
        return before
    if node.is_atom:
        return node, True
    return (node, False) if node.has_forward else before


def _placed(param: torch.Tensor) -> tuple[str, int]:
    """Return the placements of a DTensor as text, and the number of parts into which they cut it."""
    placements = getattr(param, "placements", None)
    if placements is None:
        return "", 1
    mesh = param.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or ["?"] * mesh.ndim
    ways = math.prod(mesh.size(dim) for dim, placement in enumerate(placements) if placement.is_shard())
    return ", ".join(f"{p} over {name}" for p, name in zip(placements, names, strict=True)), ways
