"""What the runner uses of Lightning that its documentation does not promise, in one place. Tested with Lightning 2.6.6.

- The connectors of the Trainer and of Fabric decide on strategy, accelerator and precision. Before they make the strategy they
  call ``_check_strategy_and_fallback``: ``_strategy_flag`` is a name or an instance then, never ``"auto"``, and ``accelerator``
  and ``cluster_environment`` exist. The precision, which they look at afterwards, is in two attributes (see :class:`Root`).
  Their arguments ``accelerator``, ``devices``, ``num_nodes`` and ``strategy`` are those of the Trainer.
- Launchers of subprocesses start the other ranks in ``_call_children_scripts``, as ``__main__.__spec__`` and ``sys.argv`` say.
- ``STRATEGY_REGISTRY[name]["strategy"]`` is what was registered under a name: a class, as a rule.
- ``_parallel_devices`` and ``_num_nodes_flag`` of a connector are the devices of a node and the number of nodes.
- ``LightningModule._device_mesh`` is what its property ``device_mesh`` returns.
- ``DDPStrategy._ddp_kwargs`` holds its ``**kwargs``. Programs read it.
- ``cli._main`` is the command ``fabric``, and ``cli._torchrun_launch(args, script_args)`` starts the script ``args.script``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch_shard.errors import ConfigError


@dataclass(frozen=True)
class Root:
    """One of Lightning's packages: the Trainer's or Fabric's, in one of two namespaces.

    Attributes:
        package: the name of the package.
        connector: the module and the class that decide on the strategy.
        registry: the name of the registry of strategies in ``<package>.strategies``.
        precision: the attributes of the connector with the precision's name, and with the plugin that was given.
        stand_in: the module of ours with the strategy that takes the place of others.
    """

    package: str
    connector: tuple[str, str]
    registry: str
    precision: tuple[str, str]
    stand_in: str

    def strategy_class(self, name: str) -> Any:
        """Return a class of ``<package>.strategies``."""
        return getattr(importlib.import_module(f"{self.package}.strategies"), name)


def _trainer_root(package: str, stand_in: str) -> Root:
    return Root(
        package,
        (f"{package}.trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
        "StrategyRegistry",
        ("_precision_flag", "_precision_plugin_flag"),
        f"lightning_shard.run.{stand_in}",
    )


def _fabric_root(package: str, stand_in: str) -> Root:
    return Root(
        package,
        (f"{package}.connector", "_Connector"),
        "STRATEGY_REGISTRY",
        ("_precision_input", "_precision_instance"),
        f"lightning_shard.run.{stand_in}",
    )


ROOTS = {
    root.connector[0]: root
    for root in (
        _trainer_root("lightning.pytorch", "for_lightning"),
        _trainer_root("pytorch_lightning", "for_pytorch_lightning"),
        _fabric_root("lightning.fabric", "for_lightning_dot_fabric"),
        _fabric_root("lightning_fabric", "for_lightning_fabric"),
    )
}
"""The packages by the module at whose import they are changed."""


def _method(module: str, owner: str, name: str) -> tuple[Any, Callable[..., Any]]:
    kind = getattr(importlib.import_module(module), owner, None)
    found = getattr(kind, name, None)
    if found is None:
        raise ConfigError(
            f"python -m lightning_shard: this version of Lightning has no {module}.{owner}.{name}, through which it is made to "
            'shard. Use one that torch_shard/versions.py lists, or Trainer(strategy="shard").'
        )
    return kind, found


def watch_strategies(root: Root, replace: Callable[[Any, Any], Any]) -> None:
    """Make every connector call ``replace(connector, strategy)`` for its strategy, and go on with what that returns.

    Raises:
        ConfigError: this Lightning has no such method.
    """
    kind, check = _method(*root.connector, "_check_strategy_and_fallback")

    @functools.wraps(check)
    def wrapped(self: Any) -> None:
        before = self._strategy_flag = replace(self, self._strategy_flag)  # first: FSDP is refused on CPUs there
        check(self)
        if self._strategy_flag != before:  # "dp" becomes "ddp" on CPUs
            self._strategy_flag = replace(self, self._strategy_flag)

    kind._check_strategy_and_fallback = wrapped


def train_on_cpu(root: Root, devices: int, nodes: int) -> None:
    """Make every connector choose `devices` CPU ranks on each of `nodes`, and a strategy for several ranks, whatever it is given.

    Raises:
        ConfigError: this Lightning has no such connector.
    """
    kind, init = _method(*root.connector, "__init__")
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.arguments.update(accelerator="cpu", devices=devices, num_nodes=nodes)
        if (
            given.arguments.get("strategy", "auto") == "auto"
        ):  # with one rank this would be a strategy that does not shard
            given.arguments["strategy"] = "ddp"
        init(*given.args, **given.kwargs)

    kind.__init__ = wrapped


def speaks(connector: Any) -> bool:
    """Return True in the process that logs for all ranks: the first one, also before ranks have numbers."""
    environment = connector.cluster_environment
    return bool(environment.node_rank() == 0 and environment.local_rank() == 0)


def registered_class(root: Root, name: str) -> Any:
    """Return the class or function that is registered under a name; None if there is none."""
    registry = getattr(importlib.import_module(f"{root.package}.strategies"), root.registry)
    return registry[name]["strategy"] if name in registry else None


def made_by_name(root: Root, name: str) -> Any:
    """Return a new instance of the class, or from the function, that is registered under a name."""
    return getattr(importlib.import_module(f"{root.package}.strategies"), root.registry).get(name)


def ranks_of(connector: Any) -> tuple[int, int]:
    """Return the number of ranks of a node, and that of nodes."""
    return len(connector._parallel_devices), connector._num_nodes_flag


def lower_precision(root: Root, connector: Any, plugins: tuple[Any, ...], renamed: dict[str, str]) -> str | None:
    """Make a connector choose the precision plugin that a strategy like DDP gets, before it makes one.

    Args:
        root: the connector's package.
        connector: the connector.
        plugins: classes of plugins that are replaced by what their ``precision`` names.
        renamed: names of precisions, and what they become.

    Returns:
        The new name if it is another one than the user's.
    """
    flag, given = root.precision
    plugin = getattr(connector, given)
    if isinstance(plugin, plugins):
        setattr(connector, given, None)
        setattr(connector, flag, plugin.precision)
    elif plugin is not None:
        return None
    name = getattr(connector, flag)
    if name not in renamed:
        return None
    setattr(connector, flag, renamed[name])
    return renamed[name]


def keep_ddp_kwargs(strategy: Any, kwargs: dict[str, Any]) -> None:
    """Give a strategy the keyword arguments of DDPStrategy that programs look up."""
    strategy._ddp_kwargs = kwargs


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Make ``module.device_mesh`` return `mesh`."""
    module._device_mesh = mesh


# -- processes --------------------------------------------------------------------------------------------------------


def watch_children(root: Root, started: Callable[[], Any]) -> None:
    """Make every launcher start the other ranks within the context that ``started()`` makes.

    Raises:
        ConfigError: this Lightning has no such method.
    """
    launchers = f"{root.package}.strategies.launchers.subprocess_script"
    kind, start = _method(launchers, "_SubprocessScriptLauncher", "_call_children_scripts")

    @functools.wraps(start)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with started():
            return start(self, *args, **kwargs)

    kind._call_children_scripts = wrapped


@contextmanager
def started_by(module: str, arguments: Sequence[str]) -> Iterator[None]:
    """Let this process look inside as if ``python -m module *arguments`` had started it, to code that starts others like it."""
    main: ModuleType = sys.modules["__main__"]
    before = main.__spec__, sys.argv
    main.__spec__, sys.argv = ModuleSpec(module, None), [module, *arguments]
    try:
        yield
    finally:
        main.__spec__, sys.argv = before


def run_fabric_cli(package: str, arguments: Sequence[str], module: str, own: Sequence[str]) -> None:
    """Run ``fabric *arguments``, with ``python -m module *own`` before the script that it starts.

    Raises:
        SystemExit: always, with the command's exit status.
        ConfigError: this Lightning has no such command.
    """
    try:
        cli: Any = importlib.import_module(f"{package}.cli")
        command, launch = cli._main, cli._torchrun_launch
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"fabric run: {package} has no such command ({error}). It needs the package click; torchrun starts ranks, too."
        ) from error

    def launch_module(args: Any, script_args: list[str]) -> None:
        args.script, rest = "-m", [module, *own, args.script, *script_args]  # torchrun's own -m
        launch(args, rest)

    cli._torchrun_launch = launch_module
    command(args=list(arguments), prog_name="fabric")
